"""Matrix products by NVIDIA's library, which picks a kernel by the number of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

product_shapes: list[str] = []  # of all products so far, rows x inner x columns, in the order of their first ones
_known: set[tuple[int, torch.Size, torch.dtype]] = set()


def library_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x [m, in] times weight [out, in], plus bias [out], in x's dtype unless a different one is given."""
    if (shape := (len(x), weight.shape, x.dtype)) not in _known:  # the library chooses a kernel, and may load it
        _known.add(shape)
        product_shapes.append(f"{len(x)}x{weight.shape[1]}x{weight.shape[0]}")
    if dtype is None or dtype == x.dtype:
        return F.linear(x, weight, bias)
    assert bias is None
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=dtype)
    return F.linear(x.to(dtype), weight.to(dtype))  # torch has the other for GPUs only
