"""The parts of a decoder layer on an NVIDIA GPU: fused kernels for few rows, cuBLAS for many.

A norm's weight is folded into the product that follows it, once, when the model is loaded, where a fused kernel takes
that product; what is left of the norm is a factor for each row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from gapless.kernels import between
from gapless.kernels.cublas import add_library_product, adds_fast, library_product
from gapless.kernels.fused import rms_norm, silu_mul
from gapless.kernels.products import Workspace, embed, product, tiling_for
from gapless.kernels.skinny import FUSED_ACTIVATIONS
from gapless.kernels.tilings import MAX_ROWS
from gapless.models.around_layers import Activated, BareProduct, NormedAdded, Product
from gapless.models.config import ModelConfig
from gapless.models.grouped_experts import GroupedExperts
from gapless.models.layers import PLAIN, ExpertWeights, GatedWeights, Hidden, Norm
from gapless.models.narrow_layers import NarrowAdded, NarrowNormed, is_narrow, taken_by_gpu
from gapless.models.spec import FUSED_LAYERS, MlpSpec, lacking
from gapless.models.weight import Weight, stacked


class SkinnyLayers:
    """Makes the parts. Without `fused`, all products are plain ones (float32 has no fused kernels)."""

    def __init__(self, device: torch.device, *, fused: bool, plain: Product = library_product) -> None:
        self._fused = fused
        self._plain = plain
        self._workspace = Workspace(device)

    @staticmethod
    def why_not(config: ModelConfig) -> str | None:
        """Why these parts do not make up the model, or None."""
        missing = lacking(config.features(), FUSED_LAYERS)
        return None if missing is None else f"its layers have no {missing}"

    def embed(self, table: Weight, scale: float = 1.0) -> Callable[[Tensor], Hidden]:
        if scale != 1.0:
            return PLAIN.embed(table, scale)
        rows = table.dense()

        def apply(token_ids: Tensor) -> Hidden:
            if self._fused and len(token_ids) <= MAX_ROWS:
                return Hidden(embed(token_ids, rows, self._workspace), num_squares=1)
            return Hidden(F.embedding(token_ids, rows))

        return apply

    def norm(self, norm: Norm) -> Callable[[Hidden], Tensor]:
        return lambda hidden: rms_norm(hidden.values, norm.weight, norm.eps, hidden.addend)

    def norm_linear(self, norm: Norm | None, weight: Weight, bias: Tensor | None) -> Callable[[Hidden], Tensor]:
        if norm is not None and is_narrow(weight := taken_by_gpu(weight)):
            return NarrowNormed(norm, weight, bias, self._workspace)
        return self._normed(norm, weight.dense(), bias)

    def norm_gated(self, norm: Norm | None, gate: GatedWeights) -> Callable[[Hidden], Tensor]:
        assert gate.gate is not None
        bias = None if gate.gate_bias is None or gate.up_bias is None else torch.cat((gate.gate_bias, gate.up_bias))
        stack = taken_by_gpu(stacked((gate.gate, gate.up)))
        if norm is not None and gate.activation == "silu" and is_narrow(stack):
            return NarrowNormed(norm, stack, bias, self._workspace, gated=True)
        both = stack.dense()
        if norm is None or gate.activation not in FUSED_ACTIVATIONS:
            return Activated(self._normed(norm, both, bias), gate.activation)
        return SkinnyNormed(
            norm, both, bias, self._workspace, self._plain, fused=self._fused, activation=gate.activation
        )

    def _normed(self, norm: Norm | None, weight: Tensor, bias: Tensor | None) -> Callable[[Hidden], Tensor]:
        if norm is None:
            bare = self._bare(weight, bias)
            return lambda hidden: bare(hidden.values)
        return SkinnyNormed(norm, weight, bias, self._workspace, self._plain, fused=self._fused)

    def _bare(self, weight: Tensor, bias: Tensor | None) -> BareProduct:
        return BareProduct(weight, bias, self._workspace, self._plain, fused=self._fused)

    def add_linear(
        self, weight: Weight, bias: Tensor | None, norm: Norm | None = None
    ) -> Callable[[Tensor, Hidden], Hidden]:
        if norm is not None:
            return NormedAdded(self._bare(weight.dense(), bias), norm, self._workspace, fused=self._fused)
        if is_narrow(weight := taken_by_gpu(weight)):
            return NarrowAdded(weight, bias, self._workspace)
        return SkinnyAdded(weight.dense(), bias, self._workspace, self._plain, fused=self._fused)

    def experts(
        self, norm: Norm | None, spec: MlpSpec, weights: ExpertWeights, after: Norm | None = None
    ) -> Callable[[Hidden], Hidden]:
        assert after is None
        return GroupedExperts(norm, spec, weights, self._workspace, self._plain, fused=self._fused)

    def linear(self, weight: Weight) -> Callable[[Tensor], Tensor]:
        data = weight.dense()

        def apply(x: Tensor) -> Tensor:
            tiling = tiling_for(len(x), *data.shape) if self._fused else None
            if tiling is None:
                return self._plain(x, data, dtype=torch.float32)
            return product(x, data, self._workspace, tiling, dtype=torch.float32)

        return apply


class SkinnyNormed:
    """A norm and a product; with an activation, those of gate and up.

    For the fused kernels the norm's weight is multiplied into the columns of the product's. That rounds once more, so
    a product that no kernel takes for a few rows is left as it is, and is the library's for any number of rows.
    """

    def __init__(
        self,
        norm: Norm,
        weight: Tensor,
        bias: Tensor | None,
        workspace: Workspace,
        plain: Product,
        *,
        fused: bool,
        activation: str | None = None,
    ) -> None:
        gated = activation is not None
        columns, inner = len(weight) // 2 if gated else len(weight), weight.shape[1]
        self._folds = (
            fused and not (gated and bias is not None) and tiling_for(2, columns, inner, gated=gated) is not None
        )
        self._norm = norm
        if self._folds:
            weight = (weight.float() * norm.weight.float()).to(weight.dtype)
            self._norm = Norm(torch.ones_like(norm.weight), norm.eps)
        self._weight, self._bias = weight, bias
        self._workspace = workspace
        self._plain = plain
        self._columns = columns
        self._activation = activation

    def __call__(self, hidden: Hidden) -> Tensor:
        x = hidden.values
        fits, gated = self._folds and hidden.num_squares > 0, self._activation is not None
        tiling = tiling_for(len(x), self._columns, x.shape[1], gated=gated) if fits else None
        if tiling is not None:
            return product(
                x,
                self._weight,
                self._workspace,
                tiling,
                num_squares=hidden.num_squares,
                eps=self._norm.eps,
                gated=gated,
                activation=self._activation or "",
                bias=self._bias,
            )
        found = self._plain(rms_norm(x, self._norm.weight, self._norm.eps, hidden.addend), self._weight, self._bias)
        if self._activation is None:
            return found
        return silu_mul(found) if self._activation == "silu" else between.gate(found, self._activation)


class SkinnyAdded:
    """A product, added to the stream in place, now or by the next norm. The norm since has added any addend before."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, workspace: Workspace, plain: Product, *, fused: bool
    ) -> None:
        self._weight, self._bias = weight, bias
        self._workspace = workspace
        self._plain = plain
        self._fused = fused

    def __call__(self, x: Tensor, hidden: Hidden) -> Hidden:
        if x.shape[1] > self._weight.shape[1]:  # gate and up, as FP8 products leave those of many rows
            x = silu_mul(x)
        tiling = tiling_for(len(x), *self._weight.shape, adds=True) if self._fused else None
        if tiling is None and self._fused and self._bias is None and adds_fast(len(x), len(self._weight)):
            add_library_product(x, self._weight, hidden.values)
            return Hidden(hidden.values)
        if tiling is None:
            return Hidden(hidden.values, addend=self._plain(x, self._weight, self._bias))
        product(x, self._weight, self._workspace, tiling, add_to=hidden.values, bias=self._bias)
        return Hidden(hidden.values, num_squares=triton.cdiv(len(self._weight), tiling.block_n))
