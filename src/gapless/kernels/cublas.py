"""Matrix products by NVIDIA's library, which picks a kernel by the number of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gapless.kernels.launch import HOPPER, generation
from gapless.kernels.tilings import MAX_ROWS

LARGE_COLUMNS, LARGE_ROWS = 4096, 8192
product_shapes: list[str] = []  # of all products so far, rows x inner x columns, in the order of their first ones
_known: set[tuple[int, torch.Size, torch.dtype]] = set()


def library_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x [m, in] times weight [out, in], plus bias [out], in x's dtype unless a different one is given."""
    _remember(x, weight)
    if dtype is None or dtype == x.dtype:
        return F.linear(x, weight, bias)
    assert bias is None
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=dtype)
    return F.linear(x.to(dtype), weight.to(dtype))  # torch has the other for GPUs only


def add_library_product(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """Add x [m, in] times weight [out, in] to the residual [m, out], in place; its sums are rounded once."""
    _remember(x, weight)
    torch.addmm(residual, x, weight.t(), out=residual)


def narrow_product(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [m, in] FP8 with scales [m, 1] times weight [out, in] FP8 with scales [1, out], plus bias, in bfloat16."""
    _remember(x, weight)
    found: Tensor = torch._scaled_mm(
        x, weight.t(), x_scales, scales, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return found


def blocked_product(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The same with scales for blocks: x_scales [m, in / 128], those of 128 numbers together, and [out, in] / 128."""
    _remember(x, weight)
    found: Tensor = torch._scaled_mm(x, weight.t(), x_scales, scales.t(), out_dtype=torch.bfloat16)
    return found


def takes_blocks(columns: int, inner: int) -> bool:
    """Whether the library takes an FP8 weight of this shape with scales for blocks of 128 by 128.

    cuBLAS has them from 12.9 on, for Hopper alone. Rows of scales begin at multiples of 16 bytes.
    """
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return generation() == HOPPER and version >= (12, 9) and columns % 128 == 0 and inner % 512 == 0


def takes_narrow(columns: int, inner: int) -> bool:
    """Whether the library takes an FP8 weight of this shape: its rows and columns begin at multiples of 16 bytes."""
    return columns % 16 == 0 and inner % 16 == 0


def adds_fast(num_rows: int, columns: int) -> bool:
    """Whether a residual that the library adds costs less than the next norm's pass over both. Measured on an H200.

    A product of few rows, or of a large model's with fewer than a full step's, would get a slower kernel.
    """
    return num_rows > (MAX_ROWS if columns < LARGE_COLUMNS else LARGE_ROWS - 1)


def _remember(x: Tensor, weight: Tensor) -> None:
    """Before the first product of a shape: the library chooses a kernel, and may load it."""
    if (shape := (len(x), weight.shape, x.dtype)) not in _known:
        _known.add(shape)
        product_shapes.append(f"{len(x)}x{weight.shape[1]}x{weight.shape[0]}")
