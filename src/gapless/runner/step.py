"""The step itself, written once: inputs in, model, logits, processors and draw, tokens out.

It has two halves, which may be launched one after the other: `predict` gives logits, `sample` tokens.
A runner calls it as it is, or records it into a graph. What stands around it differs: where inputs come from, and how
rows move on. Knows no plan and no packing. Runs on the compute stream; never waits, never looks at a value on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from gapless.attention.base import Attend, Attention, AttentionBatch
from gapless.core.plan import score_width
from gapless.kernels.basis import Basis
from gapless.runner.logprobs import score
from gapless.runner.processors import SampledRows


class Model(Protocol):
    """The model, as a step uses it."""

    @property
    def vocab_size(self) -> int: ...

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states [n, hidden_size]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [m, vocab_size]."""

    def few_layers(self) -> Model:
        """The same with as few layers as launch every kernel that all of them launch."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The sampler's results."""

    tokens: torch.Tensor  # [n] int64
    basis: Basis | None = None  # what kernels drew from; in torch, `sampler.judged` tells it


class Sampler(Protocol):
    """The sampler, as a step uses it."""

    def __call__(self, logits: torch.Tensor, sampled: SampledRows, needs: int) -> Drawn:
        """Tokens for logits [n, vocab], which stay as they are; `needs` says what any of the rows needs."""


# (logits [n, vocab], tokens [n] int64, num_top) -> scores [n, score_width] int32
Score = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of the model in one step."""

    token_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens] int64
    batch: AttentionBatch
    sample_tokens: torch.Tensor | None = None  # [num_samples] which tokens are followed by a sample; None: all


@dataclass(frozen=True, slots=True)
class Predicted:
    """The results of a step's first half."""

    hidden: torch.Tensor  # [num_tokens, hidden_size]
    logits: torch.Tensor  # [num_samples, vocab_size] the model's own, before any processor


@dataclass(frozen=True, slots=True)
class Outputs:
    """The results of a step."""

    tokens: torch.Tensor  # [num_samples] int64
    hidden: torch.Tensor  # [num_tokens, hidden_size]
    logits: torch.Tensor  # [num_samples, vocab_size] the model's own, before any processor
    basis: Basis | None = None


class Step:
    """From inputs to tokens."""

    def __init__(self, model: Model, attention: Attention, sampler: Sampler, score: Score | None = None) -> None:
        """score: of this device, with the meaning of `logprobs.score`; None: that one."""
        self.model = model
        self.attention = attention
        self.sampler = sampler
        self.score = score

    def rehearsal(self) -> Step:
        """A step that launches the same kernels, few times, and whose results mean nothing."""
        return Step(self.model.few_layers(), self.attention, self.sampler, self.score)

    def predict(self, inputs: Inputs) -> Predicted:
        """The model's half."""
        hidden = self.model.forward(inputs.token_ids, inputs.positions, self.attention.begin(inputs.batch))
        picked = hidden if inputs.sample_tokens is None else hidden[inputs.sample_tokens]
        return Predicted(hidden, self.model.logits(picked) if len(picked) else hidden[:0])

    def sample(
        self, found: Predicted, sampled: SampledRows, needs: int, processed: torch.Tensor | None = None
    ) -> Outputs:
        """The sampler's half. processed: the logits to sample from, if processors changed them."""
        if len(found.logits) == 0:
            nothing = torch.empty(0, dtype=torch.int64, device=found.hidden.device)
            return Outputs(nothing, found.hidden, found.logits)
        logits = found.logits if processed is None else processed
        drawn = self.sampler(logits, sampled, needs)
        return Outputs(drawn.tokens, found.hidden, found.logits, drawn.basis)


@dataclass(frozen=True, slots=True)
class Targets:
    """Prompt tokens whose log-probabilities are wanted, and where the logits that judge them come from."""

    tokens: torch.Tensor  # [num_targets] int64
    places: torch.Tensor  # [num_targets] int64, what `logits_of` is asked for
    logits_of: Callable[[torch.Tensor], torch.Tensor]
    slice_size: int  # places at a time: the logits of a whole prompt would not fit into memory


def write_scores(
    out: torch.Tensor,
    num_top: int,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    targets: Targets,
    by: Score | None = None,
) -> None:
    """Log-probabilities of tokens [n] under logits [n, vocab], then those of the targets, into `out`."""
    by = by or score
    scores = out.view(-1, score_width(num_top))
    count, size = len(logits), targets.slice_size
    if count:
        scores[:count] = by(logits, tokens.clamp(min=0), num_top)  # NO_SAMPLE has no logit
    for start in range(0, len(targets.tokens), size):
        part = slice(start, start + size)
        scores[count:][part] = by(targets.logits_of(targets.places[part]), targets.tokens[part], num_top)
