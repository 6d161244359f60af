"""Experts on a GPU: the weights of all experts of a layer as two stacks, of which kernels read the chosen ones.

Nothing asks the device for a number, so steps with experts can be captured. Knows the norm and the router around the
experts; kernels/expert_products groups the rows.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from gapless.kernels.expert_products import ExpertStream, add_experts, add_of_one, fits_one
from gapless.kernels.fused import rms_norm
from gapless.kernels.products import Workspace, product, tiling_for
from gapless.models.expert_stacks import is_narrow, stack_experts
from gapless.models.layers import ExpertWeights, Hidden, Norm
from gapless.models.spec import MlpSpec


class RouterProduct(Protocol):
    """x [m, in], weight [out, in] -> [m, out] in the dtype."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor: ...


_ROUTER_ROWS = 32  # a fused product takes as many columns of the router at a time


class GroupedExperts:
    """The stream plus what its experts make of it, normalized before.

    fused: the norm's weight is folded into router and experts, and its factors come from the sums of squares that the
    product before left behind; the sums for the next norm are left likewise. Into numbers of 4 bits nothing is folded.
    """

    def __init__(
        self,
        norm: Norm | None,
        spec: MlpSpec,
        weights: ExpertWeights,
        workspace: Workspace,
        plain: RouterProduct,
        *,
        fused: bool,
        invariant: bool = False,
    ) -> None:
        self._norm = norm
        self._folds = fused and norm is not None and norm.kind == "rms" and not is_narrow(weights)
        self._router = self._folded(_filled_up(weights.router.dense(), spec))
        self._stack = stack_experts(spec, weights, self._folded)
        self._counts = torch.zeros(self._stack.count, dtype=torch.int32, device=self._router.device)
        if self._folds:
            assert norm is not None
            self._norm = Norm(torch.ones_like(norm.weight), norm.eps)
        self._workspace, self._plain, self._invariant = workspace, plain, invariant
        self._fits_one = fits_one(self._stack)

    def _folded(self, weight: Tensor) -> Tensor:
        if not self._folds:
            return weight
        assert self._norm is not None
        return (weight.float() * self._norm.weight.float()).to(weight.dtype)

    def __call__(self, hidden: Hidden) -> Hidden:
        x, num_squares = hidden.values, hidden.num_squares if self._folds else 0
        if len(x) == 1 and num_squares and self._fits_one:
            assert self._norm is not None
            stream = ExpertStream(x, self._workspace.squares, num_squares, self._norm.eps)
            return Hidden(x, num_squares=add_of_one(x, self._router, self._stack, stream, self._counts))
        tiling = tiling_for(len(x), *self._router.shape) if num_squares else None
        eps = 0.0 if self._norm is None else self._norm.eps
        if tiling is not None:
            logits = product(
                x, self._router, self._workspace, tiling, num_squares=num_squares, eps=eps, dtype=torch.float32
            )
            stream = ExpertStream(x, self._workspace.squares, num_squares, eps)
        else:
            x = self._normalized(hidden)
            logits = self._plain(x, self._router, dtype=torch.float32)
            stream = ExpertStream(hidden.values, self._workspace.squares, 0, eps)
        left = add_experts(x, logits, self._stack, stream, self._counts, invariant=self._invariant)
        return Hidden(hidden.values, num_squares=left if self._folds else 0)

    def _normalized(self, hidden: Hidden) -> Tensor:
        """Any addend is added to the stream first."""
        if self._norm is not None and self._norm.kind == "rms":
            return rms_norm(hidden.values, self._norm.weight, self._norm.eps, hidden.addend)
        if hidden.addend is not None:
            hidden.values.add_(hidden.addend)
        return hidden.values if self._norm is None else self._norm(hidden.values)


def _filled_up(router: Tensor, spec: MlpSpec) -> Tensor:
    """With a shared expert's gate, it has an odd number of rows: zeros more, which no kernel looks at."""
    return functional.pad(router, (0, 0, 0, -len(router) % _ROUTER_ROWS)) if spec.num_shared else router
