"""Rows of numbers of 8 bits (FP8, e4m3), with scales by which the largest just fit, for NVIDIA GPUs.

A row has one scale, or one for every 128 numbers, where the weights that it meets have scales for blocks.
Rows for a product of FP8 weights are narrowed in the pass that makes them: the norm, or SiLU with the gate's product.
`widen` is the way back, for weights. Runs under Triton's interpreter too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gapless.kernels.launch import launch_dependents_and_wait, pdl

FP8 = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(1e-30)  # of a row of zeros
GROUP = 128  # numbers that share a scale, where a row has several
FULL = 16  # a number of rows that the library takes with such scales is a multiple of this


@dataclass(frozen=True, slots=True)
class NarrowRows:
    """Rows as a product of FP8 weights takes them."""

    data: torch.Tensor  # [n, size] FP8; with groups, rows of anything behind them, up to a multiple of FULL
    scales: torch.Tensor  # [n, 1] float32; with groups [n, size / 128], those of a group together


@triton.jit
def _store_narrow(
    value, out, scales, token, column, mask, scales_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """scales_stride: from a group to the next."""
    if GROUPS == 1:
        scale = tl.maximum(tl.max(tl.abs(value), axis=0) / LARGEST, SMALLEST_SCALE)
        tl.store(scales + token, scale)
        narrow = value / scale
    else:
        parts = tl.reshape(value, [BLOCK // 128, 128])
        scale = tl.maximum(tl.max(tl.abs(parts), axis=1) / LARGEST, SMALLEST_SCALE)
        group = tl.arange(0, BLOCK // 128)
        tl.store(scales + group * scales_stride + token, scale, mask=group < GROUPS)
        narrow = tl.reshape(parts / scale[:, None], [BLOCK])
    narrow = tl.clamp(narrow, -LARGEST, LARGEST)
    tl.store(out + token * SIZE + column, narrow.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _narrow_norm(
    x, addend, weight, out, scales, eps, scales_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ADD: x += addend first, in place."""
    launch_dependents_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    at = token * SIZE + column
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(addend + at, mask=mask, other=0.0).to(tl.float32)
        kept = value.to(x.dtype.element_ty)
        tl.store(x + at, kept, mask=mask)
        value = kept.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    _store_narrow(value * factor * gain, out, scales, token, column, mask, scales_stride, SIZE, BLOCK, GROUPS)


@triton.jit
def _narrow(
    x, out, scales, scales_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GATED: x holds gate and up side by side, and the row is silu(gate) * up."""
    launch_dependents_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    base = x + token * (2 * SIZE if GATED else SIZE) + column
    value = tl.load(base, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        value = value * tl.sigmoid(value) * tl.load(base + SIZE, mask=mask, other=0.0).to(tl.float32)
    _store_narrow(value, out, scales, token, column, mask, scales_stride, SIZE, BLOCK, GROUPS)


def narrow_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, addend: torch.Tensor | None = None, *, groups: bool = False
) -> NarrowRows:
    """x [n, size] over its root mean square, times weight [size]; the addend is first added to x, in place."""
    rows, shape = _make(len(x), x.shape[1], x.device, groups=groups)
    given = x if addend is None else addend
    _narrow_norm[(len(x),)](
        x, given, weight, rows.data, rows.scales, eps, rows.scales.stride(1), ADD=addend is not None, **shape
    )
    return rows


def narrow(x: torch.Tensor, *, groups: bool = False) -> NarrowRows:
    """x [n, size] as it is."""
    rows, shape = _make(len(x), x.shape[1], x.device, groups=groups)
    _narrow[(len(x),)](x, rows.data, rows.scales, rows.scales.stride(1), GATED=False, **shape)
    return rows


def narrow_silu_mul(both: torch.Tensor, *, groups: bool = False) -> NarrowRows:
    """silu(gate) * up, for gate and up side by side [n, 2 * size]."""
    rows, shape = _make(len(both), both.shape[1] // 2, both.device, groups=groups)
    _narrow[(len(both),)](both, rows.data, rows.scales, rows.scales.stride(1), GATED=True, **shape)
    return rows


def _make(num_rows: int, size: int, device: torch.device, *, groups: bool) -> tuple[NarrowRows, dict[str, object]]:
    if groups:
        num_rows = -(-num_rows // FULL) * FULL
    num_groups = size // GROUP if groups else 1
    data = torch.empty(num_rows, size, dtype=FP8, device=device)
    block = triton.next_power_of_2(size)
    shape = {"SIZE": size, "BLOCK": block, "GROUPS": num_groups, "num_warps": min(16, max(4, block // 512)), **pdl()}
    scales = torch.empty(num_groups, num_rows, dtype=torch.float32, device=device)
    return NarrowRows(data, scales.t() if groups else scales.view(num_rows, 1)), shape


@triton.jit
def _widen(data, scales, out, num_rows, SIZE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """One row of a weight; scales [BLOCKS, num_rows], one for every 128 numbers."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    value = tl.load(data + row * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scales + column // 128 * num_rows + row, mask=mask, other=0.0)
    tl.store(out + row * SIZE + column, (value * scale).to(out.dtype.element_ty), mask=mask)


def widen(data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole of an FP8 weight [out, in] with scales [in / 128, out], for a product that follows at once."""
    size, block = data.shape[1], 2048
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    grid = (len(data), triton.cdiv(size, block))
    _widen[grid](data, scales, out, len(data), SIZE=size, BLOCKS=len(scales), BLOCK=block, num_warps=4)
    return out
