"""Picks the next token of every sampled row, on the device, in one pass.

A random draw is a function of (seed, position) alone: one uniform number a row, looked up in the row's own cumulative
distribution. Nothing about a row's result depends on which other rows are in the batch, or on when it ran.
"""

from __future__ import annotations

import torch

from gapless.core.plan import NO_SAMPLE
from gapless.runner.row_store import RowStore

FIRST_LOOK = 256  # likeliest tokens, in which most filters find their floor
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64's constants, as signed numbers


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    store: RowStore,
    *,
    random: bool = False,
    filtered: bool = False,
    min_tokens: bool = False,
) -> torch.Tensor:
    """Tokens [n] int64 for logits [n, vocab]; `places` [n] is the position that each token will have.

    The flags say what any of the rows needs; a row that does not need it is not changed by it. A row whose largest
    logit is not finite gets NO_SAMPLE.
    """
    logits = logits.float()
    if min_tokens:
        logits = forbid_stops(logits, store.stop_ids[rows], places + 1 < store.min_total[rows])
    greedy = logits.argmax(dim=-1)  # of NaN, if there is any
    top = logits.gather(1, greedy[:, None])
    broken = ~top.squeeze(1).isfinite()
    if not random:
        return greedy.masked_fill(broken, NO_SAMPLE)
    temperature, top_p, min_p = store.floats[rows].unbind(1)
    warm = temperature > 0
    below_top = logits - top  # at most 0: no temperature makes it overflow
    scaled = below_top / torch.where(warm, temperature, 1.0)[:, None]
    if filtered:
        floor = lowest_kept(scaled, store.top_k[rows], top_p, min_p)
        scaled = scaled.masked_fill(scaled < floor[:, None], -torch.inf)
    drawn = draw(scaled, uniform(store.seed[rows], places))
    return torch.where(warm, drawn, greedy).masked_fill(broken, NO_SAMPLE)


def forbid_stops(logits: torch.Tensor, stop_ids: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
    """Logits with the stop tokens of `early` rows out of reach."""
    forbidden = early[:, None] & (stop_ids >= 0)
    columns = torch.where(forbidden, stop_ids, 0)
    penalty = torch.zeros_like(logits)
    penalty.scatter_reduce_(1, columns, torch.where(forbidden, -torch.inf, 0.0).to(logits.dtype), "amin")
    return logits + penalty


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
