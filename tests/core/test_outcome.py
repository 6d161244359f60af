"""When a request is over: the rule for one request, and the scheduler that applies it to all rows at once."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import make_limits, make_request
from gapless.core.outcome import how_over
from gapless.core.params import SamplingParams
from gapless.core.request import int_array
from gapless.core.scheduler import Scheduler

VOCAB = 4
LIMITS = make_limits(max_model_len=8)


@pytest.mark.parametrize(
    ("generated", "min_tokens", "most", "reason"),
    [
        ((), 0, 3, None),
        ((1,), 0, 3, None),
        ((7,), 0, 3, "stop"),
        ((7,), 1, 3, None),  # the first that counts comes after the minimum
        ((1, 7), 1, 3, "stop"),
        ((7, 1), 0, 3, None),  # only the last one ends it
        ((1, 2, 3), 0, 3, "length"),
        ((1, 2, 7), 0, 3, "stop"),
        ((1, 2, 7), 3, 3, "length"),
    ],
)
def test_the_rule(generated: Sequence[int], min_tokens: int, most: int, reason: str | None) -> None:
    assert how_over(generated, SamplingParams(min_tokens=min_tokens), (5, 7), most) == reason


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int, tuple[int, ...]]:
    """Prompt length, max_tokens, min_tokens and stop tokens of a request."""
    max_tokens = draw(st.integers(1, 9))
    stop_ids = tuple(draw(st.sets(st.integers(0, VOCAB - 1), max_size=3)))
    return draw(st.integers(1, 7)), max_tokens, draw(st.integers(0, max_tokens)), stop_ids


@given(st.lists(sizes(), min_size=1, max_size=6), st.integers(0, 2**32))
def test_the_scheduler_ends_a_request_when_the_rule_does(
    asked: list[tuple[int, int, int, tuple[int, ...]]], seed: int
) -> None:
    scheduler, dice = Scheduler(LIMITS), random.Random(seed)
    for number, (num_prompt, max_tokens, min_tokens, stop_ids) in enumerate(asked):
        values = {"max_tokens": max_tokens, "min_tokens": min_tokens, "stop_token_ids": stop_ids}
        scheduler.add(make_request(str(number), [1] * num_prompt, LIMITS, streams=True, **values))
    generated: dict[str, list[int]] = defaultdict(list)
    while (plan := scheduler.schedule()) is not None:
        commit = scheduler.commit(plan, int_array([dice.randrange(VOCAB) for _ in range(plan.num_results)]))
        ends = {finished.request.id: finished.reason for finished in commit.finished}
        for request, token in ((progress.request, progress.token) for progress in commit.progress):
            generated[request.id].append(token)
            most = request.limit - request.num_prompt
            assert ends.get(request.id) == how_over(generated[request.id], request.params, request.stop_ids, most)
    assert not scheduler.has_requests
    assert len(generated) == len(asked)
