"""Experts: several MLPs, of which a router chooses a few for each token.

Owns routing and the sum over experts, in plain torch. Tokens are grouped by expert, so each expert that is chosen is
read once a step and the others are not. How many tokens an expert gets is known to the host, which only a CPU allows:
`grouped_experts` is for GPUs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gapless.models.spec import ExpertSpec
from gapless.models.weight import GatedLinear, Linear


class Experts:
    """x [n, hidden_size] -> what the chosen experts make of it, weighted by the router [n, hidden_size]."""

    __slots__ = ("_experts", "_router", "_spec")

    def __init__(self, spec: ExpertSpec, router: Linear, experts: Sequence[tuple[GatedLinear, Linear]]) -> None:
        self._spec, self._router, self._experts = spec, router, experts

    def __call__(self, x: Tensor) -> Tensor:
        chosen, shares = self._route(x)
        out = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():  # in ascending order, so that sums do not depend on the batch
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            inner, down = self._experts[expert]
            out.index_add_(0, rows, down(inner(x[rows])) * shares[rows, places, None])
        return out

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Which experts, and their shares, both [n, num_chosen], or more columns where some are shared."""
        logits = self._router(x).float()
        scores = logits[:, : self._spec.count]
        best = scores.topk(self._spec.num_chosen, dim=-1)
        if self._spec.is_normalized:
            shares = best.values.softmax(dim=-1)
        else:
            shares = scores.softmax(dim=-1).gather(1, best.indices)
        chosen = best.indices
        if self._spec.shared_size:
            chosen, shares = self._with_shared(chosen, shares, logits[:, self._spec.count :])
        return chosen, shares.to(x.dtype)

    def _with_shared(self, chosen: Tensor, shares: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        """The same and the parts of the shared expert, each with the share that its gate gives it."""
        first, last = self._spec.count, len(self._experts)
        parts = torch.arange(first, last, device=chosen.device).expand(len(chosen), -1)
        return torch.cat((chosen, parts), 1), torch.cat((shares, gate.sigmoid().expand_as(parts)), 1)
