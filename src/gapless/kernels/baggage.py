"""What new owners bring along beside their seats, into the rows: two Triton kernels of a captured step with chunks.

How much there is, is data: the header of the packed plan has the numbers, and a fixed number of programs shares the
work. The first kernel clears the counts of rows with a new owner and stores biases. The second stores the new counts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.core.row_fields import SEAT_WORDS
from gapless.kernels.mixed import find_baggage

MOST_PROGRAMS = 128
TILE = 1024


@triton.jit
def _clear(packed, counts, biases, bias_stride, VOCAB: tl.constexpr, SEAT_WORDS: tl.constexpr, TILE: tl.constexpr):
    """Forget the counts of earlier owners, and store the biases of new ones."""
    at, num_counted, num_counts, num_biases = find_baggage(packed, SEAT_WORDS)
    first = tl.program_id(0) * TILE
    step = tl.num_programs(0) * TILE
    for i in range(num_counted):
        row = tl.load(at + i).to(tl.int64)
        for start in range(first, VOCAB, step):
            column = start + tl.arange(0, TILE)
            tl.store(counts + row * VOCAB + column, tl.zeros([TILE], tl.int16), mask=column < VOCAB)
    at += num_counted + 3 * num_counts
    for start in range(first, num_biases, step):
        entry = start + tl.arange(0, TILE)
        here = entry < num_biases
        row = tl.load(at + 4 * entry, mask=here, other=0).to(tl.int64)
        index = tl.load(at + 4 * entry + 1, mask=here, other=0)
        to = biases + row * bias_stride + 2 * index
        tl.store(to, tl.load(at + 4 * entry + 2, mask=here, other=0), mask=here)
        tl.store(to + 1, tl.load(at + 4 * entry + 3, mask=here, other=0), mask=here)


@triton.jit
def _store(packed, counts, VOCAB: tl.constexpr, SEAT_WORDS: tl.constexpr, TILE: tl.constexpr):
    """The counts of tokens that new owners know already."""
    at, num_counted, num_counts, _ = find_baggage(packed, SEAT_WORDS)
    at += num_counted
    for start in range(tl.program_id(0) * TILE, num_counts, tl.num_programs(0) * TILE):
        entry = start + tl.arange(0, TILE)
        here = entry < num_counts
        row = tl.load(at + 3 * entry, mask=here, other=0).to(tl.int64)
        token = tl.load(at + 3 * entry + 1, mask=here, other=0)
        count = tl.load(at + 3 * entry + 2, mask=here, other=0)
        tl.store(counts + row * VOCAB + token, count.to(tl.int16), mask=here)


def take_in_baggage(packed: torch.Tensor, counts: torch.Tensor, biases: torch.Tensor) -> None:
    """counts [num_rows, vocab] int16, biases [num_rows, most, 2] int32. `packed`: as kernels/mixed.py says."""
    sizes = {"VOCAB": counts.shape[1], "SEAT_WORDS": SEAT_WORDS, "TILE": TILE, "num_warps": 4}
    grid = (min(MOST_PROGRAMS, triton.cdiv(counts.shape[1], TILE)),)
    _clear[grid](packed, counts, biases, biases.stride(0), **sizes)
    _store[grid](packed, counts, **sizes)
