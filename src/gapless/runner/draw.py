"""The sampler for NVIDIA GPUs: which of its kernels a step launches. `sampler.sample` has the same meaning in torch."""

from __future__ import annotations

import torch

from gapless.core.row_fields import ALL_NEEDS, need
from gapless.kernels.argmax import argmax
from gapless.kernels.draw import draw
from gapless.kernels.shortlist import SIZES, ShortlistSizes
from gapless.runner.processors import SampledRows
from gapless.runner.row_store import seat_columns

READ = need("temperature", "top_k", "top_p", "min_p", "min_total")  # by the kernels
assert READ == ALL_NEEDS, "no kernel reads one of the row fields: a GPU would ignore it without a word"


def pick(
    logits: torch.Tensor, sampled: SampledRows, needs: int, *, sizes: ShortlistSizes = SIZES
) -> torch.Tensor:
    """Tokens [n] int64, as `sampler.sample` would choose them. What a row does not use costs it next to nothing.

    Logits are read, never written: a log-probability may be computed from them afterwards.
    """
    if not needs:
        return argmax(logits)
    return draw(logits, sampled.rows, sampled.places, seat_columns(sampled.seats), sizes)
