"""Parts of the fused layers for families beyond Llama: no norm before, a norm after, activations other than SiLU.

Products are the fused kernels' for few rows and cuBLAS's for many, as in `skinny_layers`; what is not fused into a
product is one kernel behind it (kernels/between).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from gapless.kernels.between import add_normed, gate
from gapless.kernels.products import Workspace, product, tiling_for
from gapless.kernels.tilings import MAX_ROWS
from gapless.models.layers import Hidden, Norm


class Product(Protocol):
    """x [m, in], weight [out, in], bias [out] -> [m, out], in x's dtype unless a different one is given."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor: ...


class BareProduct:
    """A product of rows as they are."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, workspace: Workspace, plain: Product, *, fused: bool
    ) -> None:
        self._weight, self._bias = weight, bias
        self._workspace, self._plain = workspace, plain
        self._fused = fused

    def __call__(self, x: Tensor) -> Tensor:
        tiling = tiling_for(len(x), *self._weight.shape) if self._fused else None
        if tiling is None:
            return self._plain(x, self._weight, self._bias)
        return product(x, self._weight, self._workspace, tiling, bias=self._bias)


class Activated:
    """Gate and up from one product of the stream, then the activation and the gate's product."""

    def __init__(self, both: Callable[[Hidden], Tensor], activation: str) -> None:
        self._both, self._activation = both, activation

    def __call__(self, hidden: Hidden) -> Tensor:
        return gate(self._both(hidden), self._activation)


class NormedAdded:
    """A product, normalized, added to the stream in place."""

    def __init__(self, product: BareProduct, norm: Norm, workspace: Workspace, *, fused: bool) -> None:
        self._product, self._norm = product, norm
        self._workspace, self._fused = workspace, fused

    def __call__(self, x: Tensor, hidden: Hidden) -> Hidden:
        assert hidden.addend is None  # only products without a norm after them leave one
        leaves = self._fused and len(x) <= MAX_ROWS
        squares = self._workspace.squares if leaves else None
        add_normed(hidden.values, self._product(x), self._norm.weight, self._norm.eps, squares)
        return Hidden(hidden.values, num_squares=1 if leaves else 0)
