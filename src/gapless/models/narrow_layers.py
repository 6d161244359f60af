"""Products with FP8 weights on a GPU: our kernels for few rows, the library with rows of 8 bits for many.

Few rows wait for memory: weights stream as they are and become bfloat16 in registers, so nothing is rounded but the
weights. Many rows wait for arithmetic: each row is narrowed to 8 bits too, with scales of its own, in the pass that
makes it. A norm's weight is folded into a weight that is quantized on load; one of a checkpoint keeps its numbers, and
its norm is a pass of its own.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gapless.kernels.cublas import blocked_product, library_product, narrow_product, takes_blocks, takes_narrow
from gapless.kernels.fused import rms_norm, silu_mul
from gapless.kernels.narrow import NarrowRows, narrow, narrow_norm, narrow_silu_mul, widen
from gapless.kernels.products import Workspace, product, tiling_for
from gapless.kernels.tilings import Tiling
from gapless.models.fp8 import BLOCK, Fp8Scheme, MakeLinear
from gapless.models.layers import Hidden, Norm
from gapless.models.linear import plain
from gapless.models.weight import Linear, Weight


def taken_by_gpu(weight: Weight) -> Weight:
    """The weight, made whole where it is FP8 of a shape that the library does not take."""
    if is_narrow(weight) and not takes_narrow(*weight.data.shape):
        return plain(weight.dense())
    return weight


def is_narrow(weight: Weight) -> bool:
    return isinstance(weight.scheme, Fp8Scheme)


class NarrowWeight:
    """An FP8 weight with its products. Gated: gate above up."""

    def __init__(
        self, weight: Weight, bias: Tensor | None, workspace: Workspace, *, gated: bool = False, adds: bool = False
    ) -> None:
        assert weight.scales is not None
        self._data, self._bias = weight.data, bias
        self._scales = weight.scales.t().contiguous()  # [1 or in / 128, out]
        self._workspace = workspace
        self._gated, self._adds = gated, adds
        self._blocks = self._find_blocks(weight.scales)

    def _find_blocks(self, scales: Tensor) -> Tensor | None:
        """The scales of blocks, [out, in] / 128, if there are such and the library takes them."""
        columns, inner = self._data.shape
        if not self.in_blocks or not takes_blocks(columns, inner):
            return None
        by_block = scales.view(columns // BLOCK, BLOCK, -1)
        return by_block[:, 0].contiguous() if bool((by_block == by_block[:, :1]).all()) else None

    @property
    def in_blocks(self) -> bool:
        """Whether each row has several scales."""
        return len(self._scales) > 1

    @property
    def made_whole(self) -> bool:
        """Whether the library cannot take the weight as it is."""
        return self.in_blocks and self._blocks is None

    def tiling(self, num_rows: int) -> Tiling | None:
        """How our kernels take so many rows; None: the library takes them."""
        num_columns, inner = self._data.shape
        columns = num_columns // 2 if self._gated else num_columns
        if (self._gated and self._bias is not None) or (self.in_blocks and inner % 128):
            return None
        return tiling_for(num_rows, columns, inner, gated=self._gated, adds=self._adds, narrow=True)

    def few(
        self, x: Tensor, tiling: Tiling, *, num_squares: int = 0, eps: float = 0.0, add_to: Tensor | None = None
    ) -> Tensor:
        """See `product`."""
        return product(
            x,
            self._data,
            self._workspace,
            tiling,
            num_squares=num_squares,
            eps=eps,
            gated=self._gated,
            add_to=add_to,
            bias=self._bias,
            scales=self._scales,
        )

    def many(self, rows: NarrowRows, num_rows: int) -> Tensor:
        """The library's product; gate and up stay side by side. num_rows: without those that fill up."""
        if self._blocks is not None:
            found = blocked_product(rows.data, rows.scales, self._data, self._blocks)[:num_rows]
            return found if self._bias is None else found.add_(self._bias)
        return narrow_product(rows.data, rows.scales, self._data, self._scales, self._bias)

    def whole(self, x: Tensor) -> Tensor:
        """The same of rows as they are, where scales are more than the library takes."""
        return library_product(x, widen(self._data, self._scales, x.dtype), self._bias)


class NarrowNormed:
    """A norm and a product. Gate and up of many rows are left side by side: the next product begins with SiLU."""

    def __init__(
        self, norm: Norm, weight: Weight, bias: Tensor | None, workspace: Workspace, *, gated: bool = False
    ) -> None:
        scheme, columns = weight.scheme, len(weight.data) // 2 if gated else len(weight.data)
        assert isinstance(scheme, Fp8Scheme)
        takes_bias = bias is None or not gated
        fits = takes_bias and tiling_for(2, columns, weight.data.shape[1], gated=gated, narrow=True) is not None
        self._folds = weight.scales is None and fits
        self._norm = Norm(torch.ones_like(norm.weight), norm.eps) if self._folds else norm
        known = scheme.quantized(weight, norm.weight if self._folds else None)
        self._weight = NarrowWeight(known, bias, workspace, gated=gated)

    def __call__(self, hidden: Hidden) -> Tensor:
        x, norm, weight = hidden.values, self._norm, self._weight
        tiling = weight.tiling(len(x))
        if tiling is not None and self._folds and hidden.num_squares:
            return weight.few(x, tiling, num_squares=hidden.num_squares, eps=norm.eps)
        if tiling is not None:
            return weight.few(rms_norm(x, norm.weight, norm.eps, hidden.addend), tiling)
        if weight.made_whole:
            return weight.whole(rms_norm(x, norm.weight, norm.eps, hidden.addend))
        return weight.many(narrow_norm(x, norm.weight, norm.eps, hidden.addend, groups=weight.in_blocks), len(x))


class NarrowAdded:
    """A product, added to the stream in place, now or by the next norm."""

    def __init__(self, weight: Weight, bias: Tensor | None, workspace: Workspace) -> None:
        assert isinstance(weight.scheme, Fp8Scheme)
        self._num_columns, self._inner = weight.data.shape
        self._weight = NarrowWeight(weight.scheme.quantized(weight), bias, workspace, adds=True)

    def __call__(self, x: Tensor, hidden: Hidden) -> Hidden:
        weight, is_gated = self._weight, x.shape[1] > self._inner  # gate and up side by side
        tiling = weight.tiling(len(x))
        if tiling is not None:
            weight.few(silu_mul(x) if is_gated else x, tiling, add_to=hidden.values)
            return Hidden(hidden.values, num_squares=triton.cdiv(self._num_columns, tiling.block_n))
        if weight.made_whole:
            return Hidden(hidden.values, addend=weight.whole(silu_mul(x) if is_gated else x))
        rows = (narrow_silu_mul if is_gated else narrow)(x, groups=weight.in_blocks)
        return Hidden(hidden.values, addend=weight.many(rows, len(x)))


class NarrowLinear:
    """A product alone, for layers that are torch's own."""

    __slots__ = ("_weight",)

    def __init__(self, workspace: Workspace, weight: Weight, bias: Tensor | None) -> None:
        self._weight = NarrowWeight(weight, bias, workspace)

    @classmethod
    def maker(cls, workspace: Workspace) -> MakeLinear:
        """Makes products; weights of shapes that the library does not take are made whole."""

        def make(weight: Weight, bias: Tensor | None) -> Linear:
            weight = taken_by_gpu(weight)
            return cls(workspace, weight, bias) if is_narrow(weight) else weight.scheme.linear(weight, bias)

        return make

    def __call__(self, x: Tensor) -> Tensor:
        weight = self._weight
        if (tiling := weight.tiling(len(x))) is not None:
            return weight.few(x, tiling)
        return weight.whole(x) if weight.made_whole else weight.many(narrow(x, groups=weight.in_blocks), len(x))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x).add_(residual)
