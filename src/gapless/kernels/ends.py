"""The two ends of a captured decode step, one Triton kernel each: rows to model inputs, and tokens to rows.

A row of padding (the last one) reads and writes its own scratch block and never advances.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.kernels.launch import launch_dependents_and_wait, pdl
from gapless.kernels.mixed import count_token


@triton.jit
def _begin(
    packed, last_token, length, blocks, ids, positions, slots, lengths, rows, num_rows, group_stride, table_stride,
    BATCH: tl.constexpr, GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: take in its new blocks, if it got any, and say what the model is fed."""
    launch_dependents_and_wait(PDL)
    i = tl.program_id(0)
    row = tl.load(packed + i).to(tl.int64)
    position = tl.load(length + row)
    for group in tl.static_range(GROUPS):
        new_block = tl.load(packed + (1 + group) * BATCH + i).to(tl.int64)
        entry = blocks + group * group_stride + row * table_stride + position // BLOCK_SIZE
        block = tl.load(entry)
        if new_block >= 0:
            block = new_block
            tl.store(entry, new_block)
        tl.store(slots + group * BATCH + i, block * BLOCK_SIZE + position % BLOCK_SIZE)
    tl.store(ids + i, tl.load(last_token + row))
    tl.store(positions + i, position)
    tl.store(lengths + i, position + 1)
    tl.store(rows + i, row)


@triton.jit
def _end(
    tokens, rows, lengths, last_token, length, counts, out, num_rows,
    COUNTS: tl.constexpr, VOCAB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: keep the sampled token and move on."""
    launch_dependents_and_wait(PDL)
    i = tl.program_id(0)
    row = tl.load(rows + i)
    token = tl.load(tokens + i)
    tl.store(out + i, token.to(tl.int32))
    real = row < num_rows
    tl.store(last_token + row, tl.where(real & (token >= 0), token, 0))  # NO_SAMPLE is below 0, and no token
    tl.store(length + row, tl.where(real, tl.load(lengths + i), 0))
    if COUNTS:
        count_token(counts, row, token, real & (token >= 0), VOCAB)


class DecodeInputs:
    """The model's inputs for a batch of a fixed size, which `begin` writes; slots for each group of layers."""

    def __init__(self, batch: int, num_groups: int, device: torch.device) -> None:
        self.batch = batch
        self.slots = torch.zeros(num_groups, batch, dtype=torch.int64, device=device)
        self.ids, self.positions, self.lengths, self.rows = (
            torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(4)
        )


def begin(
    packed: torch.Tensor,
    last_token: torch.Tensor,
    length: torch.Tensor,
    blocks: torch.Tensor,
    block_size: int,
    inputs: DecodeInputs,
) -> None:
    """`packed` int32: rows, then for each group of layers each row's new block or -1. blocks: tables of each group."""
    _begin[(inputs.batch,)](
        packed, last_token, length, blocks,
        inputs.ids, inputs.positions, inputs.slots, inputs.lengths, inputs.rows,
        len(last_token) - 1, blocks.stride(0), blocks.stride(1),
        BATCH=inputs.batch, GROUPS=len(blocks), BLOCK_SIZE=block_size, num_warps=1, **pdl(),
    )  # fmt: skip


def end(
    tokens: torch.Tensor,
    inputs: DecodeInputs,
    last_token: torch.Tensor,
    length: torch.Tensor,
    counts: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write `tokens` [batch] int64 to the rows and to `out` int32. counts: None where no row has penalties."""
    counting = {"COUNTS": counts is not None, "VOCAB": 0 if counts is None else counts.shape[1]}
    _end[(inputs.batch,)](
        tokens, inputs.rows, inputs.lengths, last_token, length, tokens if counts is None else counts, out,
        len(last_token) - 1, num_warps=1, **counting, **pdl(),
    )  # fmt: skip
