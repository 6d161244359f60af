"""The sampler for NVIDIA GPUs: which of its kernels a step launches. `sampler.sample` has the same meaning in torch."""

from __future__ import annotations

import torch

from gapless.core.row_fields import ALL_NEEDS, need
from gapless.kernels.argmax import argmax
from gapless.kernels.draw import draw, forbid_stops
from gapless.runner.processors import SampledRows
from gapless.runner.row_store import seat_columns

MIN_TOKENS = need("min_total")
READ = MIN_TOKENS | need("temperature", "top_k", "top_p", "min_p")  # by the kernels
assert READ == ALL_NEEDS, "no kernel reads one of the row fields: a GPU would ignore it without a word"


def pick(
    logits: torch.Tensor, sampled: SampledRows, needs: int, *, key_bits: int = 32, block: int = 4096
) -> torch.Tensor:
    """Tokens [n] int64, as `sampler.sample` would choose them; what a row does not use costs it nothing.

    Logits of forbidden stop tokens are overwritten. With 16 key bits, tokens are drawn from logits rounded to bfloat16,
    and filters take half the passes; greedy rows are exact.
    """
    if not needs:
        return argmax(logits)
    rows, places, fields = sampled.rows, sampled.places, seat_columns(sampled.seats)
    if needs & MIN_TOKENS:
        forbid_stops(logits, rows, places, fields)
    return draw(logits, rows, places, fields, key_bits=key_bits, block=block)
