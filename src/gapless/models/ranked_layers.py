"""The parts of a decoder layer where several ranks hold the model: those of one device, and sums between them.

Wraps the layers of any device. The first product of attention and of the MLP has its outputs divided and needs no word
from other ranks; the second has its inputs divided, and its results are summed. Each rank has some rows of the
vocabulary: embeddings are summed, logits gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from gapless.models.config import ModelConfig
from gapless.models.layers import ExpertWeights, GatedWeights, Hidden, Layers, Norm, make_experts
from gapless.models.rank_group import RankGroup
from gapless.models.spec import MlpSpec
from gapless.models.weight import Weight


class RankedLayers:
    """One rank's parts."""

    def __init__(self, inner: Layers, group: RankGroup, vocab_size: int) -> None:
        self._inner, self._group, self._vocab_size = inner, group, vocab_size

    @staticmethod
    def why_not(config: ModelConfig) -> str | None:
        """The wrapped layers have reasons of their own."""
        return None

    def embed(self, table: Weight, scale: float = 1.0) -> Callable[[Tensor], Hidden]:
        rows, group = table.dense(), self._group
        first, last = group.rank * len(rows), len(rows) - 1
        factor = torch.tensor(scale, dtype=rows.dtype, device=rows.device)  # rounded as the model was trained

        def apply(token_ids: Tensor) -> Hidden:
            places = token_ids - first
            held = places.clamp(0, last)
            found = F.embedding(held, rows).masked_fill_((places != held)[:, None], 0)
            values = group.add(found)
            return Hidden(values if scale == 1.0 else values * factor)

        return apply

    def norm(self, norm: Norm) -> Callable[[Hidden], Tensor]:
        return self._inner.norm(norm)

    def norm_linear(self, norm: Norm | None, weight: Weight, bias: Tensor | None) -> Callable[[Hidden], Tensor]:
        return self._inner.norm_linear(norm, weight, bias)

    def norm_gated(self, norm: Norm | None, gate: GatedWeights) -> Callable[[Hidden], Tensor]:
        return self._inner.norm_gated(norm, gate)

    def add_linear(
        self, weight: Weight, bias: Tensor | None, norm: Norm | None = None
    ) -> Callable[[Tensor, Hidden], Hidden]:
        product, group = self._inner.linear(weight), self._group

        def apply(x: Tensor, hidden: Hidden) -> Hidden:
            total = group.add(product(x).to(x.dtype))
            if bias is not None:
                total.add_(bias)
            return Hidden((total if norm is None else norm(total)).add_(hidden.values))

        return apply

    def experts(
        self, norm: Norm | None, spec: MlpSpec, weights: ExpertWeights, after: Norm | None = None
    ) -> Callable[[Hidden], Hidden]:
        group = self._group
        experts = make_experts(spec, weights if group.rank == 0 else _without_last_bias(weights))

        def apply(hidden: Hidden) -> Hidden:
            total = group.add(experts(hidden.values if norm is None else norm(hidden.values)))
            return Hidden((total if after is None else after(total)).add_(hidden.values))

        return apply

    def linear(self, weight: Weight) -> Callable[[Tensor], Tensor]:
        """That of the logits."""
        product, group, vocab_size = self._inner.linear(weight), self._group, self._vocab_size

        def apply(x: Tensor) -> Tensor:
            parts = group.gather(product(x))  # [num_ranks, n, rows of a rank]
            return parts.movedim(0, 1).flatten(1)[:, :vocab_size].contiguous()

        return apply


def on_ranks(layers: Layers, group: RankGroup, vocab_size: int) -> Layers:
    """The parts of one rank of a group."""
    return layers if group.size == 1 else RankedLayers(layers, group, vocab_size)


def _without_last_bias(weights: ExpertWeights) -> ExpertWeights:
    """It is added once, by rank 0: what experts give is weighted before it is summed."""
    return replace(weights, experts=tuple(replace(expert, down_bias=None) for expert in weights.experts))
