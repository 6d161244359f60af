"""Small operations between the products, each as one Triton kernel, for NVIDIA GPUs.

With a few dozen tokens a kernel costs its launch, not its work. So the norm of a layer, and SiLU with the gate's
product, are one kernel each. Runs under Triton's interpreter too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.kernels.launch import launch_dependents_and_wait, pdl


@triton.jit
def _rms_norm(x, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    value = tl.load(x + token * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + column, (value * scale * gain).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_rms_norm(x, addend, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """x += addend, in place; out = the norm of the sum."""
    launch_dependents_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    at = token * SIZE + column
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(addend + at, mask=mask, other=0.0).to(tl.float32)
    kept = value.to(x.dtype.element_ty)
    tl.store(x + at, kept, mask=mask)
    value = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, (value * scale * gain).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _silu_mul(both, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    gate = tl.load(both + token * 2 * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + token * 2 * SIZE + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, addend: torch.Tensor | None = None) -> torch.Tensor:
    """x [n, size] over its root mean square, times weight [size]; the addend is first added to x, in place."""
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    shape = {"SIZE": x.shape[1], "BLOCK": block, "num_warps": min(16, max(4, block // 512)), **pdl()}
    if addend is None:
        _rms_norm[(len(x),)](x, weight, out, eps, **shape)
    else:
        _add_rms_norm[(len(x),)](x, addend, weight, out, eps, **shape)
    return out


def silu_mul(both: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, for gate and up side by side [n, 2 * size]."""
    size = both.shape[1] // 2
    out = torch.empty(len(both), size, dtype=both.dtype, device=both.device)
    block = min(1024, triton.next_power_of_2(size))
    _silu_mul[(len(both), triton.cdiv(size, block))](both, out, SIZE=size, BLOCK=block, num_warps=4, **pdl())
    return out
