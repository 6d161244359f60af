"""Sampling and log-probabilities on NVIDIA GPUs: which kernels a step launches.

`sampler.sample` and `logprobs.score` have the same meaning in torch.
"""

from __future__ import annotations

import torch

from gapless.core.plan import score_width
from gapless.core.row_fields import ALL_NEEDS, BIASED, COUNTED, PROCESSED_SCORES, need
from gapless.kernels.adjust import adjust
from gapless.kernels.argmax import argmax
from gapless.kernels.basis import Basis
from gapless.kernels.draw import draw
from gapless.kernels.scores import score_rows
from gapless.kernels.shortlist import SIZES, ShortlistSizes
from gapless.runner.processors import SampledRows
from gapless.runner.row_store import seat_columns
from gapless.runner.step import Drawn

DRAWN = need("temperature", "top_k", "top_p", "min_p", "min_total")  # read by kernels/draw
ADJUSTED = COUNTED | BIASED | need("masked", "top_n_sigma", "typical_p")  # read by kernels/adjust
SCORED = PROCESSED_SCORES  # read by kernels/scores
assert DRAWN | ADJUSTED | SCORED == ALL_NEEDS, (
    "no kernel reads one of the row fields: a GPU would ignore it without a word"
)


def pick(logits: torch.Tensor, sampled: SampledRows, needs: int, *, sizes: ShortlistSizes = SIZES) -> Drawn:
    """Tokens, as `sampler.sample` would choose them. What a row does not use costs it next to nothing.

    Logits are read, never written: a log-probability may be computed from them afterwards.
    """
    if not needs:
        return Drawn(argmax(logits))
    rows, places, state = sampled.rows, sampled.places, sampled.state
    fields = seat_columns(state.seats)
    adjusted = adjust(logits, rows, places, fields, state.masks, state.counts, state.biases, sizes.block)
    tokens, bounds = draw(logits, adjusted, rows, places, fields, sizes)
    return Drawn(tokens, Basis(rows, places, fields, adjusted, bounds))


def score_samples(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    places: torch.Tensor,
    num_top: torch.Tensor,
    out: torch.Tensor,
    basis: Basis | None = None,
    *,
    sizes: ShortlistSizes = SIZES,
) -> None:
    """Write the scores of tokens [n] int64 under logits [n, vocab] into `out` int32, without a value from the host.

    places [n] int32: which score of `out` is that of each row, -1 where it has none. num_top [1] int32. A score has
    `score_width(num_top)` numbers; of equal logits the lower token comes first. NO_SAMPLE is scored as token 0.
    basis: what the tokens were drawn from, which rows with the field `processed_scores` are scored by. It is spent.
    """
    score_rows(logits, tokens, places, num_top, out, basis, sizes)


def score(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """Scores [n, score_width] int32 of tokens [n] int64, as `logprobs.score` has them, by the same kernels."""
    places = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    out = torch.empty(len(logits), score_width(num_top), dtype=torch.int32, device=logits.device)
    score_samples(logits, tokens, places, torch.full_like(places[:1], num_top), out)
    return out
