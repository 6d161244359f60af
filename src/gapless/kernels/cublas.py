"""Matrix products by NVIDIA's library, which picks a kernel by the number of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def library_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x [m, in] times weight [out, in], plus bias [out], in x's dtype unless a different one is given."""
    if dtype is None or dtype == x.dtype:
        return F.linear(x, weight, bias)
    assert bias is None
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=dtype)
    return F.linear(x.to(dtype), weight.to(dtype))  # torch has the other for GPUs only
