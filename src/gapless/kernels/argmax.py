"""The largest logit of each row, in two Triton kernels: of each tile of the vocabulary, then of the tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.core.plan import NO_SAMPLE
from gapless.kernels.launch import launch_dependents_and_wait, pdl


@triton.jit
def _largest(
    logits, values, indices, VOCAB: tl.constexpr, BLOCK: tl.constexpr, NUM_TILES: tl.constexpr, PDL: tl.constexpr
):
    """The largest logit of one tile of one row, and where it is."""
    launch_dependents_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * VOCAB + column, mask=column < VOCAB, other=-float("inf")).to(tl.float32)
    best = tl.max(value, axis=0)
    tl.store(values + row * NUM_TILES + tile, best)
    tl.store(indices + row * NUM_TILES + tile, tl.min(tl.where(value == best, column, VOCAB), axis=0))


@triton.jit
def _largest_of_tiles(
    values, indices, tokens, NUM_TILES: tl.constexpr, BLOCK: tl.constexpr, NO_SAMPLE: tl.constexpr, PDL: tl.constexpr
):
    """The first of the largest logits of one row; NO_SAMPLE where they are not finite."""
    launch_dependents_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    here = tile < NUM_TILES
    value = tl.load(values + row * NUM_TILES + tile, mask=here, other=-float("inf"))
    index = tl.load(indices + row * NUM_TILES + tile, mask=here, other=2147483647)
    best = tl.max(value, axis=0)
    token = tl.min(tl.where(here & (value == best), index, 2147483647), axis=0)
    fine = (best > -float("inf")) & (best < float("inf"))
    tl.store(tokens + row, tl.where(fine, token, NO_SAMPLE).to(tl.int64))


def argmax(logits: torch.Tensor, tile: int = 4096) -> torch.Tensor:
    """Index of the first largest logit of each row [n] int64; NaN counts as nothing, and no number as NO_SAMPLE."""
    num_rows, vocab = logits.shape
    num_tiles = triton.cdiv(vocab, tile)
    values = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    indices = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    tiles = {"NUM_TILES": num_tiles, **pdl()}
    _largest[(num_rows, num_tiles)](logits, values, indices, VOCAB=vocab, BLOCK=tile, num_warps=8, **tiles)
    block = triton.next_power_of_2(num_tiles)
    _largest_of_tiles[(num_rows,)](values, indices, tokens, BLOCK=block, NO_SAMPLE=NO_SAMPLE, num_warps=1, **tiles)
    return tokens
