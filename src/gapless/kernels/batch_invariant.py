"""Batch-invariant matrix products: a row's sums are the same, in the same order, for any number of rows.

A library picks different kernels for different batch sizes, and with them different orders of additions. Here every
product is tiled in one way, and the inner dimension is walked from its beginning to its end. It is slower, and gives
the same bits in any batch. Runs under Triton's interpreter too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 64


@triton.jit(do_not_specialize=["num_rows"])
def _batch_invariant_product(
    x, weight, bias, out, num_rows,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the result. Columns vary fastest, so that programs side by side share their rows of x."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + inner
        a = tl.load(x + row[:, None] * K + at[None, :], mask=(row < num_rows)[:, None] & (at < K)[None, :], other=0.0)
        b_at = weight + column[:, None].to(tl.int64) * K + at[None, :]
        b = tl.load(b_at, mask=(column < N)[:, None] & (at < K)[None, :], other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    mask = (row < num_rows)[:, None] & (column < N)[None, :]
    tl.store(out + row[:, None] * N + column[None, :], acc.to(out.dtype.element_ty), mask=mask)


def batch_invariant_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [m, K] times weight [N, K], plus bias [N], in x's dtype unless a different one is given."""
    num_rows, inner = x.shape
    columns = len(weight)
    out = torch.empty(num_rows, columns, dtype=dtype or x.dtype, device=x.device)
    _batch_invariant_product[(triton.cdiv(columns, BLOCK_N), triton.cdiv(num_rows, BLOCK_M))](
        x.contiguous(), weight, weight if bias is None else bias, out, num_rows,
        N=columns, K=inner, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, num_stages=4,
    )  # fmt: skip
    return out
