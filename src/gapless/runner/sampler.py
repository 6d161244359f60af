"""Picks the next token of every sampled row, on the device, in one pass.

A random draw is a function of (seed, position) alone: one uniform number a row, looked up in the row's own cumulative
distribution. Nothing about a row's result depends on which other rows are in the batch, or on when it ran.
"""

from __future__ import annotations

import torch

from gapless.core.plan import NO_SAMPLE
from gapless.core.row_fields import need
from gapless.runner.processors import PROCESSORS, Fields, SampledRows
from gapless.runner.step import Drawn

DRAWS = need("temperature")
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64's constants, as signed numbers


def sample(logits: torch.Tensor, sampled: SampledRows, needs: int) -> torch.Tensor:
    """Tokens [n] int64 for logits [n, vocab]. `needs` says what any of the rows needs (row_fields.need).

    A row that does not need it is not changed by it. A row whose largest logit is not finite gets NO_SAMPLE.
    """
    logits = logits.float()
    fields = sampled.fields(needs) if needs else {}
    logits = _process(logits, fields, needs)
    tokens = logits.argmax(dim=-1)  # of NaN, if there is any
    has_top = logits.gather(1, tokens[:, None]).squeeze(1).isfinite()
    if needs & DRAWS:
        drawn = draw(logits, uniform(fields["seed"], fields["place"]))
        tokens = torch.where(fields["temperature"] > 0, drawn, tokens)
    return torch.where(has_top, tokens, NO_SAMPLE)


def pick(logits: torch.Tensor, sampled: SampledRows, needs: int) -> Drawn:
    """The same, as a step's sampler."""
    return Drawn(sample(logits, sampled, needs))


def judged(raw: torch.Tensor, logits: torch.Tensor, sampled: SampledRows, needs: int) -> torch.Tensor:
    """The logits [n, vocab] that log-probabilities are of: `raw`, or for rows that want it what tokens are drawn from.

    logits: those that the sampler is given. To be called before the step's tokens are counted.
    """
    fields = sampled.fields(needs)
    is_processed = fields["processed_scores"][:, None] > 0
    return torch.where(is_processed, _process(logits.float(), fields, needs), raw.float())


def _process(logits: torch.Tensor, fields: Fields, needs: int) -> torch.Tensor:
    for processor in PROCESSORS:
        if needs & processor.needs:
            logits = processor.apply(logits, fields)
    return logits


def draw(logits: torch.Tensor, uniform_: torch.Tensor) -> torch.Tensor:
    """Inverse transform sampling: the token under whose share of the distribution the uniform number falls."""
    mass = logits.softmax(dim=1, dtype=torch.float64).cumsum(dim=1)
    target = uniform_[:, None] * mass[:, -1:]
    return torch.searchsorted(mass, target, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)


def uniform(seed: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1), float64, from (seed, place): two rounds of a 64-bit mixer, its upper 53 bits."""
    bits = _mix(_mix(seed) + place)
    return _shift(bits, 11).to(torch.float64) * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x + _MIX[0]
    x = (x ^ _shift(x, 30)) * _MIX[1]
    x = (x ^ _shift(x, 27)) * _MIX[2]
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
