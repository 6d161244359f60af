"""Experts: several MLPs, of which a router chooses a few for each token.

Owns routing and the sum over experts, in plain torch. Tokens are grouped by expert, so each expert that is chosen is
read once a step and the others are not. How many tokens an expert gets is known to the host, which only a CPU allows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gapless.models.layers import GatedWeights, Hidden
from gapless.models.spec import ExpertSpec
from gapless.models.weight import GatedLinear, Linear, Weight, shared_scheme


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert."""

    gate: GatedWeights
    down: Weight
    down_bias: Tensor | None


class Experts:
    """The stream, normalized -> what the chosen experts make of it, weighted by the router [n, hidden_size]."""

    __slots__ = ("_experts", "_norm", "_router", "_spec")

    def __init__(
        self,
        spec: ExpertSpec,
        norm: Callable[[Hidden], Tensor],
        router: tuple[Weight, Tensor | None],
        experts: Sequence[ExpertWeights],
    ) -> None:
        self._spec, self._norm = spec, norm
        weight, bias = router
        self._router = weight.scheme.linear(weight, bias)
        self._experts = [_products(expert) for expert in experts]

    def __call__(self, hidden: Hidden) -> Tensor:
        x = self._norm(hidden)
        chosen, shares = self._route(x)
        out = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():  # in ascending order, so that sums do not depend on the batch
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            inner, down = self._experts[expert]
            out.index_add_(0, rows, down(inner(x[rows])) * shares[rows, places, None])
        return out

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Which experts, and their shares, both [n, num_chosen]."""
        scores = self._router(x).float()
        best = scores.topk(self._spec.num_chosen, dim=-1)
        if self._spec.is_normalized:
            shares = best.values.softmax(dim=-1)
        else:
            shares = scores.softmax(dim=-1).gather(1, best.indices)
        return best.indices, shares.to(x.dtype)


def _products(expert: ExpertWeights) -> tuple[GatedLinear, Linear]:
    gate = expert.gate
    assert gate.gate is not None
    scheme = shared_scheme((gate.gate, gate.up))
    inner = scheme.gated(gate.gate, gate.up, (gate.gate_bias, gate.up_bias), gate.activation)
    return inner, expert.down.scheme.linear(expert.down, expert.down_bias)
