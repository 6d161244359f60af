"""The parts of a decoder layer in batch-invariant mode on a GPU: a row's result does not depend on other rows.

A weight that the fused kernels can tile has one order of additions for any number of rows (kernels/batch_invariant),
with the norm folded into it as in `skinny_layers`; its squares are added up free of order (kernels/order_free). Other
weights have a plain product and a norm of its own. The weight alone decides, never the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from gapless.kernels.batch_invariant import FEW_ROWS, WideProduct, plain_product, sum_width, tiling_of_few
from gapless.kernels.fused import rms_norm, silu_mul
from gapless.kernels.order_free import embed_and_square, norm_scales, sum_squares
from gapless.kernels.products import Workspace, product
from gapless.kernels.tilings import MAX_ROWS
from gapless.models.config import ModelConfig
from gapless.models.grouped_experts import GroupedExperts
from gapless.models.layers import PLAIN, ExpertWeights, GatedWeights, Hidden, Norm
from gapless.models.spec import INVARIANT_LAYERS, MlpSpec, lacking
from gapless.models.weight import Weight


class InvariantLayers:
    """Makes the parts. Without `fused`, all products are plain ones (float32 has no fused kernels)."""

    def __init__(self, device: torch.device, *, fused: bool) -> None:
        self._fused = fused
        self._workspace = Workspace(device)

    @staticmethod
    def why_not(config: ModelConfig) -> str | None:
        """Why these parts do not make up the model, or None."""
        missing = lacking(config.features(), INVARIANT_LAYERS)
        return None if missing is None else f"its layers have no {missing}"

    def embed(self, table: Weight, scale: float = 1.0) -> Callable[[Tensor], Hidden]:
        if scale != 1.0:
            return PLAIN.embed(table, scale)
        rows = table.dense()
        size = rows.shape[1]
        width = sum_width(size)

        def apply(token_ids: Tensor) -> Hidden:
            if not self._fused or len(token_ids) > FEW_ROWS:
                return Hidden(F.embedding(token_ids, rows))
            values = embed_and_square(token_ids, rows, self._workspace.squares, width=width, stride=MAX_ROWS)
            return Hidden(values, num_squares=-(-size // width))

        return apply

    def norm(self, norm: Norm) -> Callable[[Hidden], Tensor]:
        return lambda hidden: rms_norm(hidden.values, norm.weight, norm.eps)

    def norm_linear(self, norm: Norm | None, weight: Weight, bias: Tensor | None) -> Callable[[Hidden], Tensor]:
        assert norm is not None
        return self._normed(norm, weight.dense(), bias, gated=False)

    def norm_gated(self, norm: Norm | None, gate: GatedWeights) -> Callable[[Hidden], Tensor]:
        assert norm is not None
        assert gate.gate is not None
        bias = None if gate.gate_bias is None or gate.up_bias is None else torch.cat((gate.gate_bias, gate.up_bias))
        return self._normed(norm, torch.cat((gate.gate.dense(), gate.up.dense())), bias, gated=True)

    def _normed(self, norm: Norm, weight: Tensor, bias: Tensor | None, *, gated: bool) -> Callable[[Hidden], Tensor]:
        if self._fits(weight, bias, gated=gated):
            return InvariantNormed(norm, weight, self._workspace, gated=gated)

        def apply(hidden: Hidden) -> Tensor:
            found = plain_product(rms_norm(hidden.values, norm.weight, norm.eps), weight, bias)
            return silu_mul(found) if gated else found

        return apply

    def add_linear(
        self, weight: Weight, bias: Tensor | None, norm: Norm | None = None
    ) -> Callable[[Tensor, Hidden], Hidden]:
        assert norm is None
        data = weight.dense()
        if self._fits(data, bias, adds=True):
            return InvariantAdded(data, self._workspace)
        return lambda x, hidden: Hidden(hidden.values.add_(plain_product(x, data, bias)))

    def experts(
        self, norm: Norm | None, spec: MlpSpec, weights: ExpertWeights, after: Norm | None = None
    ) -> Callable[[Hidden], Hidden]:
        assert after is None
        return GroupedExperts(norm, spec, weights, self._workspace, plain_product, fused=False, invariant=True)

    def linear(self, weight: Weight) -> Callable[[Tensor], Tensor]:
        data = weight.dense()
        if not self._fits(data, None):
            return lambda x: plain_product(x, data, dtype=torch.float32)
        wide = WideProduct(data)

        def apply(x: Tensor) -> Tensor:
            if len(x) > FEW_ROWS:
                return wide(x, torch.empty(len(x), len(data), dtype=torch.float32, device=x.device))
            tiling = tiling_of_few(len(x), *data.shape)
            assert tiling is not None
            return product(x, data, self._workspace, tiling, dtype=torch.float32)

        return apply

    def _fits(self, weight: Tensor, bias: Tensor | None, *, gated: bool = False, adds: bool = False) -> bool:
        columns = len(weight) // 2 if gated else len(weight)
        fits = tiling_of_few(2, columns, weight.shape[1], gated=gated, adds=adds) is not None
        return self._fused and bias is None and fits


class InvariantNormed:
    """A norm and a product, with SiLU and the gate where there is one. The norm's weight is folded into the other."""

    def __init__(self, norm: Norm, weight: Tensor, workspace: Workspace, *, gated: bool) -> None:
        self._weight = (weight.float() * norm.weight.float()).to(weight.dtype)
        self._eps = norm.eps
        self._workspace = workspace
        self._columns = len(weight) // 2 if gated else len(weight)
        self._gated = gated
        self._width = sum_width(weight.shape[1])
        self._wide = WideProduct(self._weight, gated=gated)

    def __call__(self, hidden: Hidden) -> Tensor:
        x = hidden.values
        num_rows, size = x.shape
        if num_rows > FEW_ROWS:
            out = torch.empty(num_rows, self._columns, dtype=x.dtype, device=x.device)
            return self._wide(x, out, norm_scales(x, self._eps, width=self._width))
        if not hidden.num_squares:
            sum_squares(x, self._workspace.squares, width=self._width, stride=MAX_ROWS)
        tiling = tiling_of_few(num_rows, self._columns, size, gated=self._gated)
        assert tiling is not None
        return product(
            x,
            self._weight,
            self._workspace,
            tiling,
            num_squares=-(-size // self._width),
            eps=self._eps,
            gated=self._gated,
            order_free=True,
        )


class InvariantAdded:
    """A product, added to the stream in place; of few rows, with the stream's sums of squares for the next norm."""

    def __init__(self, weight: Tensor, workspace: Workspace) -> None:
        self._weight = weight
        self._workspace = workspace
        self._wide = WideProduct(weight, adds=True)

    def __call__(self, x: Tensor, hidden: Hidden) -> Hidden:
        if len(x) > FEW_ROWS:
            return Hidden(self._wide(x, hidden.values))
        tiling = tiling_of_few(len(x), *self._weight.shape, adds=True)
        assert tiling is not None
        product(x, self._weight, self._workspace, tiling, add_to=hidden.values, order_free=True)
        return Hidden(hidden.values, num_squares=len(self._weight) // tiling.block_n)
