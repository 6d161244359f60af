"""Sums whose bits do not depend on the order of additions, and norms by them, in Triton.

The order in which a kernel adds the numbers of a tile depends on the tile's shape and on the number of warps. Integers
have the same sum in any order, so numbers are added as multiples of a small part of the largest one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.kernels.launch import launch_dependents_and_wait, pdl

SUM_BITS = tl.constexpr(21)  # of the largest number, as an integer: up to 1024 of them fit into 31 bits
LEAST_EXPONENT = tl.constexpr(64)  # of float32, biased: what is smaller counts as this


@triton.jit
def order_free_sum(values, axis: tl.constexpr):
    """The sum over an axis of at most 1024 float32 numbers, none below zero."""
    largest = tl.max(values, axis=axis).to(tl.int32, bitcast=True)
    exponent = tl.maximum(largest >> 23, LEAST_EXPONENT)
    inverse = ((-exponent + SUM_BITS + 254) << 23).to(tl.float32, bitcast=True)
    total = tl.sum((values * tl.expand_dims(inverse, axis) + 0.5).to(tl.int32), axis=axis)
    return total.to(tl.float32) * ((exponent - SUM_BITS) << 23).to(tl.float32, bitcast=True)


@triton.jit
def any_sum(values, axis: tl.constexpr, ORDER_FREE: tl.constexpr):
    """The sum over an axis, the faster way or the one above."""
    if ORDER_FREE:
        return order_free_sum(values, axis)
    else:
        return tl.sum(values, axis=axis)


@triton.jit
def _squares(
    ids, x, values, out, eps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, STRIDE: tl.constexpr, EMBEDS: tl.constexpr,
    SCALES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums of squares of one row, a sum for each `WIDTH` columns, or what its norm multiplies it by.

    EMBEDS: the row is that of a token in a table, and is copied to `values`.
    """
    launch_dependents_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = column < SIZE
    row = token
    if EMBEDS:
        row = tl.load(ids + token).to(tl.int64)
    value = tl.load(x + row * SIZE + column, mask=mask, other=0.0)
    if EMBEDS:
        tl.store(values + token * SIZE + column, value, mask=mask)
    kept = value.to(tl.float32)
    sums = order_free_sum(kept * kept, 1)
    if SCALES:
        tl.store(out + token, tl.rsqrt(order_free_sum(sums, 0) / SIZE + eps))
    else:
        tl.store(out + group * STRIDE + token, sums, mask=group * WIDTH < SIZE)


def _launch(
    ids: torch.Tensor, x: torch.Tensor, values: torch.Tensor, out: torch.Tensor, *, eps: float, width: int, stride: int
) -> None:
    """One program for each of `ids`. stride: between the sums of a row; 0: scales are wanted."""
    size = x.shape[1]
    _squares[(len(ids),)](
        ids, x, values, out, eps, SIZE=size, WIDTH=width, GROUPS=triton.next_power_of_2(triton.cdiv(size, width)),
        STRIDE=stride, EMBEDS=values is not x, SCALES=stride == 0, num_warps=4, **pdl(),
    )  # fmt: skip


def embed_and_square(
    ids: torch.Tensor, table: torch.Tensor, squares: torch.Tensor, *, width: int, stride: int
) -> torch.Tensor:
    """Rows of the table [vocab, size]; and sums of squares, each of `width` columns, into `squares` [sums, stride]."""
    out = torch.empty(len(ids), table.shape[1], dtype=table.dtype, device=table.device)
    _launch(ids, table, out, squares, eps=0.0, width=width, stride=stride)
    return out


def sum_squares(x: torch.Tensor, squares: torch.Tensor, *, width: int, stride: int) -> None:
    """Sums of squares of the rows of x, each of `width` columns, into `squares` [sums, stride]."""
    _launch(x, x, x, squares, eps=0.0, width=width, stride=stride)


def norm_scales(x: torch.Tensor, eps: float, *, width: int) -> torch.Tensor:
    """What an RMS norm multiplies each row of x by. [num_rows] float32"""
    out = torch.empty(len(x), dtype=torch.float32, device=x.device)
    _launch(x, x, x, out, eps=eps, width=width, stride=0)
    return out
