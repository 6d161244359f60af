"""The draw of tokens where several ranks hold the model: rank 0 draws, and everybody gets its tokens.

So ranks cannot come to different tokens, and masks, penalties and logits processors matter on rank 0 alone.
"""

from __future__ import annotations

import torch

from gapless.models.rank_group import RankGroup
from gapless.runner.processors import SampledRows
from gapless.runner.step import Drawn, Sampler


class SharedSampler:
    """A sampler on every rank, which asks the given one on rank 0."""

    def __init__(self, inner: Sampler, group: RankGroup) -> None:
        self._inner, self._group = inner, group

    def __call__(self, logits: torch.Tensor, sampled: SampledRows, needs: int) -> Drawn:
        if self._group.rank == 0:
            drawn = self._inner(logits, sampled, needs)
        else:  # log-probabilities are read from rank 0 alone
            drawn = Drawn(torch.empty(len(logits), dtype=torch.int64, device=logits.device))
        self._group.share(drawn.tokens)
        return drawn


def shared(sampler: Sampler, group: RankGroup) -> Sampler:
    """The sampler of one rank of a group."""
    return sampler if group.size == 1 else SharedSampler(sampler, group)
