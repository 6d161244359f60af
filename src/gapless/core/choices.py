"""Several choices of one prompt: the parameters of each candidate, and the candidates that are returned.

`best_of` candidates run, and `n` of them are returned. Offline and served requests follow the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import TypeVar

from gapless.core.outcome import TokenLogprob
from gapless.core.params import SamplingParams, derive_seed

T = TypeVar("T")
SEED_STEP = 0xD1B54A32D192ED03  # different from the step between prompts: no choice has the seed of another prompt


def num_candidates(params: SamplingParams) -> int:
    """Requests that one prompt becomes."""
    return params.n if params.best_of is None else params.best_of


def is_ranked(params: SamplingParams) -> bool:
    """Whether some candidates are not returned. Only then does the order depend on log-probabilities."""
    return num_candidates(params) > params.n


def candidates(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each candidate. The first has the given seed, the others have seeds derived from it."""
    if num_candidates(params) == 1:
        return [params]
    logprobs = 0 if is_ranked(params) and params.logprobs is None else params.logprobs
    common = replace(params, n=1, best_of=None, logprobs=logprobs)
    if params.seed is None:  # the engine gives each request a seed of its own
        return [common] * num_candidates(params)
    others = (derive_seed(params.seed, number, SEED_STEP) for number in range(1, num_candidates(params)))
    return [common, *(replace(common, seed=seed) for seed in others)]


def mean_logprob(logprobs: Iterable[TokenLogprob | None]) -> float:
    """By which candidates are ranked; minus infinity without tokens."""
    found = [item.logprob for item in logprobs if item is not None]
    return sum(found) / len(found) if found else -inf


def best(found: Sequence[T], count: int, score: Callable[[T], float]) -> list[T]:
    """Those with the highest scores, best first; of equal ones, the earlier first."""
    return sorted(found, key=score, reverse=True)[:count]
