"""Logits processors: the steps between the model and the draw, each in plain torch.

A processor names the fields of a seat that it reads. It runs when some sampled row has a value there that is not
neutral, and leaves rows with neutral values as they are. These definitions run on a CPU and are the oracles of the
kernels that stand for them on a GPU (kernels/draw.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from gapless.core.baggage import MOST
from gapless.core.row_fields import BIASED, COUNTED, need
from gapless.runner.row_store import RowState, seat_columns

FIRST_LOOK = 256  # likeliest tokens, in which most filters find their floor
MASKED = need("masked")
# By the value of a byte of a mask: eight bytes, 1 for each token that it does not allow. Eight tokens in one lookup.
_FORBIDDEN = torch.tensor([[1 - (byte >> bit & 1) for bit in range(8)] for byte in range(256)], dtype=torch.uint8)
_FORBIDDEN = _FORBIDDEN.view(torch.int64).flatten()

# [n] or [n, width] of each field of a seat; "place": of the token to come; "mask", "counts", "biases": if needed
Fields = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of a step that get a token."""

    rows: torch.Tensor  # [n] int64
    places: torch.Tensor  # [n] int64, the position that each token will have
    state: RowState  # of all rows

    def fields(self, needs: int) -> Fields:
        """The fields that processors read; what is large, only where it is needed."""
        found = seat_columns(self.state.seats[self.rows]) | {"place": self.places}
        if needs & MASKED:
            found["mask"] = self.state.masks[self.rows]
        if needs & COUNTED:
            found["counts"] = self.state.counts[self.rows]
        if needs & BIASED:
            found["biases"] = self.state.biases[self.rows]
        return found


@dataclass(frozen=True, slots=True)
class Processor:
    """Turns logits [n, vocab] into others."""

    needs: int  # it runs when a plan needs any of these fields
    apply: Callable[[torch.Tensor, Fields], torch.Tensor]


def forbid_stops(logits: torch.Tensor, fields: Fields) -> torch.Tensor:
    """Put the stop tokens of rows that may not end yet out of reach."""
    stop_ids, is_early = fields["stop_ids"].long(), fields["place"] + 1 < fields["min_total"]
    forbidden = is_early[:, None] & (stop_ids >= 0)
    columns = torch.where(forbidden, stop_ids, 0)
    penalty = torch.zeros_like(logits)
    penalty.scatter_reduce_(1, columns, torch.where(forbidden, -torch.inf, 0.0).to(logits.dtype), "amin")
    return logits + penalty


def mask(logits: torch.Tensor, fields: Fields) -> torch.Tensor:
    """Put tokens that the row's guide does not allow out of reach."""
    words = torch.where((fields["masked"] > 0)[:, None], fields["mask"], -1)
    places = words.view(torch.uint8).int()  # [n, bytes]
    forbidden = _FORBIDDEN.to(logits.device).index_select(0, places.flatten()).view(torch.bool).view(len(logits), -1)
    return logits.masked_fill(forbidden[:, : logits.shape[1]], -torch.inf)


def add_biases(logits: torch.Tensor, fields: Fields) -> torch.Tensor:
    """Add each bias to the logit of its token."""
    count = fields["num_biases"].long()
    biases = fields["biases"][:, : int(count.max())]
    is_used = torch.arange(biases.shape[1], device=logits.device) < count[:, None]
    tokens = torch.where(is_used, biases[..., 0], 0).long()
    values = torch.where(is_used, biases[..., 1].contiguous().view(torch.float32), 0.0)
    return logits.scatter_add(1, tokens, values.to(logits.dtype))


def penalize(logits: torch.Tensor, fields: Fields) -> torch.Tensor:
    """Make tokens that occurred before less likely; penalties below their neutral value make them likelier."""
    generated = fields["counts"] & MOST
    is_seen = fields["counts"] != 0
    factor = torch.where(is_seen, fields["repetition_penalty"][:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits = logits - fields["frequency_penalty"][:, None] * generated
    return logits - fields["presence_penalty"][:, None] * (generated > 0)


def keep_near_top(logits: torch.Tensor, fields: Fields) -> torch.Tensor:
    """Top-n-sigma: keep logits within so many standard deviations of the largest. What is -inf does not count."""
    is_finite = logits.isfinite()
    count = is_finite.sum(dim=1).clamp(min=1)
    mean = logits.where(is_finite, 0.0).sum(dim=1) / count
    sigma = (((logits - mean[:, None]).where(is_finite, 0.0) ** 2).sum(dim=1) / count).sqrt()
    top_n = fields["top_n_sigma"]
    floor = torch.where(top_n > 0, logits.amax(dim=1) - top_n * sigma, -torch.inf)
    return logits.masked_fill(logits < floor[:, None], -torch.inf)


def keep_typical(logits: torch.Tensor, fields: Fields) -> torch.Tensor:
    """Typical-p: keep tokens whose information is closest to the entropy, until they reach the probability.

    Information and entropy, each less the same number, are the logit's distance to the largest, and its mean.
    """
    below = logits - logits.amax(dim=1, keepdim=True)
    probs = below.softmax(dim=1, dtype=torch.float64)
    mean = (probs * below.where(below.isfinite(), 0.0)).sum(dim=1, keepdim=True)
    distance = (below - mean.to(below.dtype)).abs()
    ordered, order = distance.sort(dim=1, stable=True)
    before = probs.gather(1, order).cumsum(dim=1) < fields["typical_p"][:, None]
    last = before.sum(dim=1, keepdim=True).clamp(max=logits.shape[1] - 1)
    farthest = torch.where(fields["typical_p"][:, None] < 1, ordered.gather(1, last), torch.inf)
    return logits.masked_fill(distance > farthest, -torch.inf)


def scale(logits: torch.Tensor, fields: Fields) -> torch.Tensor:
    """Divide the distance to the largest logit by the temperature: at most 0, so that no temperature overflows."""
    temperature = fields["temperature"]
    below_top = logits - logits.amax(dim=1, keepdim=True)
    return below_top / torch.where(temperature > 0, temperature, 1.0)[:, None]


def keep_likeliest(logits: torch.Tensor, fields: Fields) -> torch.Tensor:
    """Top-k, then top-p, then min-p. All three keep every token from some logit up."""
    floor = lowest_kept(logits, fields["top_k"], fields["top_p"], fields["min_p"])
    return logits.masked_fill(logits < floor[:, None], -torch.inf)


PROCESSORS = (
    Processor(MASKED, mask),
    Processor(need("min_total"), forbid_stops),
    Processor(BIASED, add_biases),
    Processor(COUNTED, penalize),
    Processor(need("top_n_sigma"), keep_near_top),
    Processor(need("typical_p"), keep_typical),
    Processor(need("temperature"), scale),
    Processor(need("top_k", "top_p", "min_p"), keep_likeliest),
)


def lowest_kept(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """The smallest logit [n] that top-k, then top-p, then min-p leave standing; -inf where none of them is used.

    Only rows that use top-k or top-p are looked at, and of those only as many of the likeliest tokens as it takes.
    """
    vocab = logits.shape[1]
    floor = torch.full_like(top_p, -torch.inf)
    left = ((top_k > 0) & (top_k < vocab) | (top_p < 1)).nonzero().squeeze(1)
    width = min(FIRST_LOOK, vocab)
    while len(left):
        found, settled = _lowest_among(logits[left], width, top_k[left], top_p[left])
        floor[left[settled]] = found[settled]
        left = left[~settled]
        width = min(8 * width, vocab)
    return torch.maximum(floor, logits.amax(dim=1) + min_p.log())  # log 0 is -inf: no floor


def _lowest_among(
    logits: torch.Tensor, width: int, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The floor of top-k and top-p as the `width` likeliest tokens show it, and whether they show it."""
    vocab = logits.shape[1]
    ordered = logits.topk(width, dim=1).values
    kept = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)
    within = torch.arange(width, device=logits.device)[None, :] < kept[:, None]
    weights = (ordered - ordered[:, :1]).exp() * within
    everything = (logits - ordered[:, :1]).exp().sum(dim=1)
    total = torch.where(kept < vocab, weights.sum(dim=1), everything)  # not needed before all kept ones are in sight
    sums = weights.cumsum(dim=1)
    nucleus = (sums - weights < (top_p * total)[:, None]).sum(dim=1)
    last = torch.where(top_p < 1, torch.minimum(kept, nucleus), kept).clamp(min=1)
    settled = (kept <= width) | (kept == vocab) & (nucleus < width)
    return ordered.gather(1, (last.clamp(max=width) - 1)[:, None]).squeeze(1), settled
