"""Matrix products of few rows with everything around them fused in, as one Triton kernel, for NVIDIA GPUs.

A decode step is bound by the bytes of its weights and by the number of its kernels. So a product here takes along the
norm before it (as a factor for each row, from sums of squares that the kernel before left behind), or SiLU and the
gate after it, or the residual it is added to. Long inner dimensions are split; the last part to finish adds up all
parts, in a fixed order. Runs under Triton's interpreter too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gapless.kernels import early, in_turn, prefetch

MAX_ROWS = 64  # beyond that cuBLAS is ahead
SQUARES_TILES = 512  # column tiles of a residual at most
ASKS = 128  # pieces of its weights that a program asks for before it waits


@triton.jit
def _ask_for_weights(
    weight, tile, split,
    K: tl.constexpr, PART: tl.constexpr, BLOCK_N: tl.constexpr, ASK_BYTES: tl.constexpr, ASKS: tl.constexpr,
):  # fmt: skip
    """The beginnings of this program's rows of the weight, `ASK_BYTES` of them in all."""
    asks_a_row: tl.constexpr = ASKS // BLOCK_N
    number_bytes: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    size: tl.constexpr = min(ASK_BYTES // ASKS, PART * number_bytes // asks_a_row)
    ask = tl.arange(0, ASKS)
    row = (tile * BLOCK_N + ask // asks_a_row).to(tl.int64)
    at = (row * K + split * PART) * number_bytes + (ask % asks_a_row) * size
    prefetch(weight.to(tl.int64) + at, tl.full([ASKS], size, tl.int32))


@triton.jit(do_not_specialize_on_alignment=["num_rows"])  # else a rare number of rows is compiled in the middle of work
def _product(
    x, weight, out, parts, counters, squares_in, squares_out, num_rows, num_squares, eps,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, MAX_SQUARES: tl.constexpr,
    ASK_BYTES: tl.constexpr, ASKS: tl.constexpr, FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of columns, over one part of the inner dimension. GATED: gate rows, then up rows, in the weight.

    FIRST: the next kernel may come in at once, not only when the weights are read.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    part_size: tl.constexpr = K // SPLITS
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if EARLY:
        _ask_for_weights(weight, tile, split, K, part_size, BLOCK_N, ASK_BYTES, ASKS)
        if GATED:
            _ask_for_weights(weight + N * K, tile, split, K, part_size, BLOCK_N, ASK_BYTES, ASKS)
        if FIRST:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # all that came before is written from here on
    for start in range(split * part_size, (split + 1) * part_size, BLOCK_K):
        a = tl.load(x + row[:, None] * K + (start + inner)[None, :], mask=(row < num_rows)[:, None], other=0.0)
        b = tl.load(weight + column[:, None].to(tl.int64) * K + (start + inner)[None, :])
        acc = tl.dot(a, tl.trans(b), acc)
        if GATED:
            up = tl.load(weight + (N + column)[:, None].to(tl.int64) * K + (start + inner)[None, :])
            acc_up = tl.dot(a, tl.trans(up), acc_up)
    if EARLY and not FIRST:
        tl.extra.cuda.gdc_launch_dependents()  # the next kernel may come in and wait

    is_last = True
    if SPLITS > 1:
        num_tiles = tl.num_programs(0)
        cell = row[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(parts + (split * num_tiles + tile) * BLOCK_M * BLOCK_N + cell, acc)
        tl.debug_barrier()  # every thread's part is written before the count says so
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if is_last:
            tl.store(counters + tile, 0)  # ready for the next product
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in tl.static_range(SPLITS):
                at = (other * num_tiles + tile) * BLOCK_M * BLOCK_N
                acc += tl.load(parts + at + cell, cache_modifier=".cg")
    if is_last:
        mask = (row < num_rows)[:, None]
        at = row[:, None].to(tl.int64) * N + column[None, :]
        if NORM:
            index = tl.arange(0, MAX_SQUARES)
            sums = tl.load(
                squares_in + index[:, None] * BLOCK_M + row[None, :], mask=(index < num_squares)[:, None], other=0.0
            )
            scale = tl.rsqrt(tl.sum(sums, axis=0) / K + eps)[:, None]
            acc = acc * scale
            if GATED:
                acc_up = acc_up * scale
        if GATED:
            acc = acc * tl.sigmoid(acc) * acc_up
        if ADD:
            acc += tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
        value = acc.to(out.dtype.element_ty)
        tl.store(out + at, value, mask=mask)
        if ADD:
            kept = value.to(tl.float32)
            tl.store(squares_out + tile * BLOCK_M + row, tl.sum(tl.where(mask, kept * kept, 0.0), axis=1))


@triton.jit
def _embed(ids, table, out, squares, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One token's embedding, and its sum of squares."""
    in_turn(EARLY)
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    value = tl.load(table + tl.load(ids + token).to(tl.int64) * SIZE + column, mask=mask, other=0.0)
    tl.store(out + token.to(tl.int64) * SIZE + column, value, mask=mask)
    kept = value.to(tl.float32)
    tl.store(squares + token, tl.sum(kept * kept, axis=0))


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut."""

    block_n: int
    block_k: int
    splits: int
    num_warps: int = 4
    num_stages: int = 4


class Workspace:
    """Scratch memory of all products of one device; the compute stream alone touches it."""

    def __init__(self, device: torch.device) -> None:
        self.parts = torch.empty(8 * MAX_ROWS * 32768, dtype=torch.float32, device=device)
        self.counters = torch.zeros(16384, dtype=torch.int32, device=device)
        self.squares = torch.zeros(SQUARES_TILES * MAX_ROWS, dtype=torch.float32, device=device)


def block_rows(num_rows: int) -> int:
    """Rows of a tile: what the matrix units take."""
    return max(16, 1 << (num_rows - 1).bit_length())


def embed(ids: torch.Tensor, table: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """Rows of the table [vocab, size], and in the workspace one sum of squares for each."""
    size = table.shape[1]
    out = torch.empty(len(ids), size, dtype=table.dtype, device=table.device)
    block = triton.next_power_of_2(size)
    _embed[(len(ids),)](ids, table, out, workspace.squares, SIZE=size, BLOCK=block, num_warps=4, **early())
    return out


def ask_bytes(inner: int) -> int:
    """What a program asks for ahead: measured, twice as much where kernels are short."""
    return 8192 if inner >= 4096 else 16384


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    workspace: Workspace,
    tiling: Tiling,
    *,
    num_squares: int = 0,
    eps: float = 0.0,
    gated: bool = False,
    add_to: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [m, K] times weight [N, K] (gated: [2 * N, K]), in x's dtype unless another is given.

    With `num_squares`, rows of x are first normalized by the sums of squares in the workspace; with `add_to`, the
    result is added to it in place, and its sums of squares are left in the workspace, one for each tile of columns.
    """
    num_rows, inner = x.shape
    columns = len(weight) // 2 if gated else len(weight)
    out = torch.empty(num_rows, columns, dtype=dtype or x.dtype, device=x.device) if add_to is None else add_to
    _product[(columns // tiling.block_n, tiling.splits)](
        x, weight, out, workspace.parts, workspace.counters, workspace.squares, workspace.squares,
        num_rows, num_squares, eps,
        N=columns, K=inner, BLOCK_M=block_rows(num_rows), BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k,
        SPLITS=tiling.splits, NORM=num_squares > 0, GATED=gated, ADD=add_to is not None,
        MAX_SQUARES=triton.next_power_of_2(max(num_squares, 1)),
        ASK_BYTES=ask_bytes(inner), ASKS=ASKS, FIRST=not gated and add_to is None,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **early(),
    )  # fmt: skip
    return out
