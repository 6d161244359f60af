"""Small operations between products that some families need and Llama does not, each as one Triton kernel.

A gate with any activation, and the norm of what is added to the stream. Both leave what the fused products read next.
Runs under Triton's interpreter too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.kernels.launch import launch_dependents_and_wait, pdl


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # the same as with tanh
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        x = x * tl.sigmoid(x)
    return x


@triton.jit
def _gate(both, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr):
    launch_dependents_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    gate = tl.load(both + token * 2 * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + token * 2 * SIZE + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + column, (_activated(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_normed(
    stream, x, weight, squares, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, LEAVES_SQUARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """stream += the norm of x, in place; LEAVES_SQUARES: and the sum of its squares for the next norm."""
    launch_dependents_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    at = token * SIZE + column
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    old = tl.load(stream + at, mask=mask, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    kept = (old + value * scale * gain).to(stream.dtype.element_ty)
    tl.store(stream + at, kept, mask=mask)
    if LEAVES_SQUARES:
        tl.store(squares + token, tl.sum(kept.to(tl.float32) * kept.to(tl.float32), axis=0))


def gate(both: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up, for gate and up side by side [n, 2 * size]."""
    assert activation in ("silu", "gelu", "gelu_tanh")
    size = both.shape[1] // 2
    out = torch.empty(len(both), size, dtype=both.dtype, device=both.device)
    block = min(1024, triton.next_power_of_2(size))
    grid = len(both), triton.cdiv(size, block)
    _gate[grid](both, out, SIZE=size, BLOCK=block, ACTIVATION=activation, num_warps=4, **pdl())
    return out


def add_normed(
    stream: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, squares: torch.Tensor | None
) -> None:
    """Add x [n, size] over its root mean square, times weight [size], to the stream, in place.

    squares: where the sum of the new stream's squares is left for each row; None: nowhere.
    """
    block = triton.next_power_of_2(x.shape[1])
    _add_normed[(len(x),)](
        stream, x, weight, stream if squares is None else squares, eps, SIZE=x.shape[1], BLOCK=block,
        LEAVES_SQUARES=squares is not None, num_warps=min(16, max(4, block // 512)), **pdl(),
    )  # fmt: skip
