"""Matrix products by NVIDIA's library, which picks a kernel by the number of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_shapes: dict[tuple[int, torch.Size, torch.dtype], None] = {}  # of all products so far, in order


def library_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x [m, in] times weight [out, in], plus bias [out], in x's dtype unless a different one is given."""
    _shapes[len(x), weight.shape, x.dtype] = None
    if dtype is None or dtype == x.dtype:
        return F.linear(x, weight, bias)
    assert bias is None
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=dtype)
    return F.linear(x.to(dtype), weight.to(dtype))  # torch has the other for GPUs only


def product_shapes() -> list[str]:
    """The shapes of all products so far, rows x inner x columns, in the order in which they were first wanted.

    For a new one the library chooses a kernel and may have to load it.
    """
    return [f"{rows}x{weight[1]}x{weight[0]}" for rows, weight, _ in list(_shapes)]
