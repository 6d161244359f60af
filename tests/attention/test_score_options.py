"""Windows, soft caps and sinks of the attention kernels, under the interpreter where there is no GPU.

Keys that a row no longer sees are NaN, and its table points nowhere for them, so that nothing may read them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from batches import BLOCK_SIZE, DEVICE, Shape, make_batch

from gapless.attention.base import AttentionBatch
from gapless.attention.reference import ReferenceAttention
from gapless.attention.triton import TritonAttention
from gapless.models.rope import RotaryRotation
from gapless.models.spec import AttentionSpec

NOWHERE = 2**40  # a block
ALL: dict[str, Any] = {"window": 30, "soft_cap": 3.0, "sinks": True, "scale": 0.5}
ROWS = Shape(4, 2, 16, (100, 31, 30, 1), ())
AHEAD = Shape(2, 1, 16, (300, 30), (), num_cores=64)  # the first keys are loaded ahead
CHUNKS = Shape(2, 1, 24, (3,), ((0, 66), (130, 70), (64, 1)), norm=True)
WIDE, NARROW = torch.float32, torch.float16  # in 16 bits tiles that all tokens see are taken in apart


@pytest.mark.parametrize(
    ("shape", "options", "dtype"),
    [
        (ROWS, {"window": 1}, WIDE),
        (ROWS, {"window": 30}, WIDE),
        (ROWS, {"window": 5000, "scale": 0.4}, WIDE),
        (ROWS, {"soft_cap": 2.0, "scale": 1.0}, WIDE),
        (ROWS, {"sinks": True}, NARROW),
        (ROWS, ALL, WIDE),
        (AHEAD, {"window": 70}, WIDE),
        (AHEAD, ALL, WIDE),
        (CHUNKS, ALL, WIDE),
        (CHUNKS, {"window": 70}, NARROW),
        (CHUNKS, ALL, NARROW),
    ],
    ids=str,
)
def test_equals_reference(shape: Shape, options: dict[str, Any], dtype: torch.dtype) -> None:
    spec = shape.spec(**options)
    generator = torch.Generator().manual_seed(11)
    batch, num_slots = make_batch(shape, generator)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE, dtype)

    pool = draw(num_slots, 2 * shape.num_kv_heads, shape.head_dim)
    heads = draw(len(batch.slots[0]), shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    weight = draw(shape.num_heads + shape.num_kv_heads, shape.head_dim) if shape.norm else None
    sinks = draw(shape.num_heads) * 2 if spec.sinks else None
    rotation = RotaryRotation(draw(len(batch.slots[0]), 2, shape.head_dim), weight, 1e-5, sinks)
    exact = RotaryRotation(
        rotation.cos_sin.float(),
        None if weight is None else weight.float(),
        1e-5,
        None if sinks is None else sinks.float(),
    )
    expected = ReferenceAttention([pool.float()], BLOCK_SIZE, [spec]).begin(batch)(0, heads.float(), exact)
    others = [shape.spec(), spec]  # layers may differ
    attention = TritonAttention(
        [pool, unseen_is_poison(pool, batch, shape, spec)], BLOCK_SIZE, others, len(batch.tables[0]), shape.num_cores
    )
    assert TritonAttention.why_not(others) is None
    limit = 1e-4 if dtype == torch.float32 else 0.02
    attend = attention.begin(without_unseen(batch, shape, spec))
    torch.testing.assert_close(attend(1, heads, rotation).float(), expected, atol=limit, rtol=limit)


def first_seen(shape: Shape, spec: AttentionSpec) -> list[int]:
    """Of each row, the first position that any of its tokens sees."""
    firsts = [length - 1 for length in shape.decode_lengths] + [start for start, _ in shape.chunks]
    return [0 if spec.window is None else max(0, first + 1 - spec.window) for first in firsts]


def unseen_is_poison(pool: torch.Tensor, batch: AttentionBatch, shape: Shape, spec: AttentionSpec) -> torch.Tensor:
    """The pool with NaN in all blocks that lie before the windows, and behind the rows' ends."""
    found = torch.full_like(pool, float("nan")).view(-1, BLOCK_SIZE, *pool.shape[1:])
    ends = [*shape.decode_lengths, *(start + count for start, count in shape.chunks)]
    whole = pool.view(found.shape)
    for table, first, end in zip(batch.tables[0], first_seen(shape, spec), ends, strict=True):
        seen = table[first // BLOCK_SIZE : -(-end // BLOCK_SIZE)]
        found[seen] = whole[seen]
        if end % BLOCK_SIZE:
            found[table[end // BLOCK_SIZE], end % BLOCK_SIZE :] = float("nan")
    return found.view(pool.shape)


def without_unseen(batch: AttentionBatch, shape: Shape, spec: AttentionSpec) -> AttentionBatch:
    """The batch with tables that know no block before the windows."""
    blocks = batch.tables[0].clone()
    for row, first in enumerate(first_seen(shape, spec)):
        blocks[row, : first // BLOCK_SIZE] = NOWHERE
    return replace(batch, tables=(blocks,))
