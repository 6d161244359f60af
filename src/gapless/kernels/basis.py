"""What the sampler's kernels drew tokens from, for kernels that tell how likely they were. Needs no Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Basis:
    """Logits [n, vocab] after masks, biases, penalties and filters, as parts that the draw leaves."""

    rows: torch.Tensor  # [n] int64
    places: torch.Tensor  # [n] int64, the position that each token will have
    fields: Mapping[str, torch.Tensor]  # of all rows, as views of their seats
    adjusted: torch.Tensor  # [n, vocab] float32, read in place of the logits for rows whose field `adjusted` says so
    bounds: torch.Tensor  # [n, 2] float32, the largest logit and the smallest that top-k, top-p and min-p keep
