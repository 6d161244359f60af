"""Seeds of choices are all different, and ranking agrees with its definition."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.core.choices import best, candidates, is_ranked, mean_logprob, num_candidates
from gapless.core.outcome import TokenLogprob
from gapless.core.params import SamplingParams, derive_seed


@pytest.mark.parametrize(
    ("n", "best_of", "count", "ranked"), [(1, None, 1, 0), (3, None, 3, 0), (2, 2, 2, 0), (2, 5, 5, 1)]
)
def test_counts(n: int, best_of: int | None, count: int, ranked: bool) -> None:
    params = SamplingParams(n=n, best_of=best_of, seed=3, top_k=7)
    each = candidates(params)
    assert num_candidates(params) == len(each) == count
    assert is_ranked(params) == ranked
    for one in each:
        assert one == replace(params, n=1, best_of=None, seed=one.seed, logprobs=0 if ranked else None)
    assert candidates(replace(params, logprobs=4))[0].logprobs == 4


def test_no_two_choices_of_any_two_prompts_share_a_seed() -> None:
    """Prompts without a seed get theirs by steps from the engine's seed; the choices' steps must not meet them."""
    prompts = [SamplingParams(n=32, seed=derive_seed(5, number)) for number in range(200)]
    seeds = [one.seed for params in prompts for one in candidates(params)]
    assert len(set(seeds)) == 32 * 200
    assert [candidates(params)[0].seed for params in prompts] == [params.seed for params in prompts]


def test_without_a_seed_the_engine_gives_each_its_own() -> None:
    assert [one.seed for one in candidates(SamplingParams(n=3))] == [None] * 3


@given(st.lists(st.lists(st.integers(-9, 0), max_size=4), min_size=1, max_size=6), st.integers(1, 6))
def test_the_best_have_the_highest_mean(scores: list[list[int]], count: int) -> None:
    found = [[TokenLogprob(1, float(score), 1, ()) for score in item] for item in scores]
    order = best(range(len(found)), count, lambda index: mean_logprob(found[index]))
    means = [Fraction(sum(item), len(item)) if item else -inf for item in scores]
    places = [sum(other > mean for other in means) + means[:index].count(mean) for index, mean in enumerate(means)]
    assert [places[index] for index in order] == list(range(min(count, len(scores))))
