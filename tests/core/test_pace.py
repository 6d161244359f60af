"""Steps that end in time: what the budget learns from them, and what the scheduler makes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeExecutor, Run, make_limits, make_request, truth
from gapless.core.pace import FIRST_TOKENS, LEAST_TOKENS, MOST_GROWTH, Pace
from gapless.core.plan import Plan
from gapless.core.scheduler import Scheduler

LIMITS = make_limits(max_batch_tokens=2000, max_model_len=4000, num_blocks=2000, prefix_cache=False)
TARGET_S = 0.2


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


class Device:
    """Takes a fixed time for a step and some more for each of its tokens, by a clock of its own."""

    def __init__(self, fixed_s: float, per_token_s: float, target_s: float = TARGET_S) -> None:
        self.clock = Clock()
        pace = Pace(target_s, LIMITS.max_batch_tokens, self.clock)
        self.run = Run(Scheduler(LIMITS, pace=pace), FakeExecutor(LIMITS))
        self.fixed_s, self.per_token_s = fixed_s, per_token_s
        self.steps: list[tuple[int, float]] = []  # tokens and seconds of each

    @property
    def pace(self) -> Pace:
        return self.run.scheduler.pace

    def step(self) -> Plan:
        plan = self.run.scheduler.schedule()
        assert plan is not None
        spent_s = self.fixed_s + self.per_token_s * plan.num_tokens
        self.clock.now_s += spent_s
        self.steps.append((plan.num_tokens, spent_s))
        self.run.commit(self.run.scheduler.commit(plan, self.run.executor.collect(self.run.executor.launch(plan))))
        return plan

    def add(self, name: str, num_prompt: int, *, streams: bool, max_tokens: int = 50) -> None:
        prompt = [1 + i % 50 for i in range(num_prompt)]
        self.run.scheduler.add(make_request(name, prompt, LIMITS, max_tokens=max_tokens, streams=streams))


def test_a_long_prompt_does_not_stop_a_stream() -> None:
    device = Device(fixed_s=0.02, per_token_s=0.001)
    device.add("stream", 5, streams=True)
    device.step()
    device.add("long", 3000, streams=True)
    steps = [device.step() for _ in range(25)]
    sizes = [plan.num_tokens for plan in steps if plan.chunks]
    assert sum(sizes) - len(sizes) == 3000
    assert max(seconds for _, seconds in device.steps) <= 1.05 * TARGET_S
    assert sizes[-2] > 0.8 * (TARGET_S - 0.02) / 0.001  # and yet the time that there is is used
    assert all(plan.num_decodes for plan in steps)


@pytest.mark.parametrize("is_older", [False, True])
def test_a_long_prompt_does_not_stop_a_stream_whose_next_tokens_must_come(is_older: bool) -> None:
    """Such a row is fed, and does not decode; a prompt is cut all the same, and comes behind it even if it is older."""
    device = Device(fixed_s=0.02, per_token_s=0.001)
    scheduler = device.run.scheduler
    if is_older:
        device.add("long", 3000, streams=False)
        scheduler.hold("long", "grammar")
    device.add("stream", 5, streams=True)
    device.step()
    (request,) = [request for request in scheduler.rows.request if request is not None]
    for number in range(3):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.force([(request, [7, 8, 9])])
        scheduler.commit(plan, device.run.executor.collect(device.run.executor.launch(plan)))
        if number == 0 and is_older:
            scheduler.release("long")
        elif number == 0:
            device.add("long", 3000, streams=False)
        plan = device.step()
        assert [chunk.row for chunk in plan.chunks if chunk.samples] == [request.row]
        assert len(plan.chunks) == 2
        assert device.steps[-1][1] <= 1.05 * TARGET_S


def test_nobody_streams_so_steps_are_as_large_as_they_can_be() -> None:
    device = Device(fixed_s=0.02, per_token_s=0.001)
    device.add("first", 5, streams=False)
    device.step()
    device.add("long", 3000, streams=False)
    assert [device.step().num_tokens for _ in range(2)] == [2000, 1002]


def test_a_fast_device_soon_has_all_of_its_budget() -> None:
    device = Device(fixed_s=0.005, per_token_s=2e-5)
    device.add("stream", 5, streams=True)
    device.step()
    device.add("long", 3900, streams=True)
    sizes = [device.step().num_tokens for _ in range(5)]
    assert sizes[:3] == [FIRST_TOKENS, FIRST_TOKENS * MOST_GROWTH, 2000]


def test_a_device_that_is_too_slow_even_without_prompts_still_takes_them_in() -> None:
    device = Device(fixed_s=1.0, per_token_s=0.01)
    device.add("stream", 5, streams=True)
    device.step()
    device.add("long", 500, streams=True)
    sizes = [device.step().num_tokens for _ in range(8)]
    assert sizes[3] == LEAST_TOKENS + 1
    assert "long" in [request.id for request in device.run.scheduler.rows.request if request is not None]


def test_one_slow_step_is_soon_forgotten() -> None:
    device = Device(fixed_s=0.005, per_token_s=1e-4)
    device.add("stream", 5, streams=True, max_tokens=500)
    device.step()
    device.add("long", 3900, streams=True)
    device.step(), device.step()
    before = device.pace.num_tokens
    device.fixed_s = 30.0  # a neighbour, a compilation
    device.step()
    assert device.pace.num_tokens < 20
    device.fixed_s = 0.005
    while device.step().chunks:
        pass
    assert device.pace.num_tokens >= before / 2


def test_time_in_which_nothing_ran_is_nobodys_step() -> None:
    device = Device(fixed_s=0.01, per_token_s=1e-4)
    device.add("first", 300, streams=True, max_tokens=1)
    device.step()
    known = device.pace.num_tokens
    device.clock.now_s += 1000.0
    device.add("second", 300, streams=True, max_tokens=1)
    device.step()
    assert device.pace.num_tokens >= known


def test_steps_in_flight_are_timed_from_the_end_of_the_one_before() -> None:
    clock = Clock()
    pace = Pace(TARGET_S, 1000, clock)
    scheduler = Scheduler(LIMITS)
    scheduler.add(make_request("a", [1] * 500, LIMITS))
    plan = scheduler.schedule()
    assert plan is not None
    first, second = replace(plan, step=1), replace(plan, step=2)
    pace.begin(first)
    pace.begin(second)
    clock.now_s += 0.1
    pace.end(first)
    clock.now_s += 0.1
    pace.end(second)  # planned 0.2 s ago, but it ran for half of that
    assert pace.num_tokens == 1000


@given(st.lists(st.tuples(st.integers(1, 3000), st.floats(1e-6, 100.0)), max_size=40), st.floats(0.001, 10.0))
def test_the_budget_stays_within_its_bounds(steps: list[tuple[int, float]], target_s: float) -> None:
    pace = Pace(target_s, 2000)
    for num_tokens, spent_s in steps:
        pace._adapt(num_tokens, spent_s)
        assert 1 <= pace.num_tokens <= 2000
        assert pace.chunk_tokens(256) >= LEAST_TOKENS


def test_without_a_target_there_is_no_bound() -> None:
    device = Device(fixed_s=50.0, per_token_s=1.0, target_s=math.inf)
    device.add("stream", 5, streams=True)
    device.step()
    device.add("long", 3000, streams=True)
    assert [device.step().num_tokens for _ in range(2)] == [2000, 1002]


@pytest.mark.parametrize("per_token_s", [1e-5, 1e-3, 0.05])
def test_tokens_do_not_depend_on_the_pace(per_token_s: float) -> None:
    device = Device(fixed_s=0.01, per_token_s=per_token_s)
    device.add("stream", 5, streams=True)
    device.step()
    device.add("long", 700, streams=True)
    while device.run.scheduler.has_requests:
        device.step()
    for name in ("stream", "long"):
        request = device.run.finished[name].request
        assert (device.run.tokens(name), device.run.finished[name].reason) == truth(request)
