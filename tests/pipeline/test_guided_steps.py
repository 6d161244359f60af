"""Guided requests in the whole pipeline: right at any depth and order of streams, and nobody else's affair."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fakes import make_limits, make_request
from gapless.core.limits import Limits
from gapless.core.outcome import Commit
from gapless.core.plan import Plan
from gapless.core.request import IntArray, Request, int_array
from gapless.core.scheduler import Scheduler
from gapless.device.base import Device
from gapless.device.checker import CheckedDevice
from gapless.device.cpu import CpuDevice
from gapless.errors import ControlFailed, InvalidRequest
from gapless.pipeline.executor import LocalExecutor
from gapless.pipeline.loop import run_loop
from gapless.pipeline.masks import MAX_SLOW, Masks
from gapless.proof.rule import Rule, run_from
from toy import LIMITS, Outcome, run_on, run_toy, toy_request, toy_requests, toy_runner, toy_truth

RULES = {"a": Rule(1), "b": Rule(2), "d": Rule(3, waits=False), "f": Rule(4, over_after=3), "g": Rule(5)}
TRUTH = {request.id: toy_truth(request, RULES.get(request.id)) for request in toy_requests()}
SCARCE = Limits(num_rows=4, num_blocks=9, block_size=4, max_batch_tokens=12, max_model_len=48)


def guided(rules: dict[str, Rule] = RULES) -> list[Request]:
    """The toy's workload, some of it guided."""
    requests = toy_requests()
    for request in requests:
        request.guide = rules[request.id].guide() if request.id in rules else None
    return requests


def test_the_rules_change_tokens() -> None:
    assert all(TRUTH[request.id] != toy_truth(request) for request in toy_requests() if request.id in RULES)


@pytest.mark.parametrize("limits", [LIMITS, SCARCE], ids=["room", "preempted"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_tokens_follow_the_guides_and_nobody_else_changes(depth: int, limits: Limits) -> None:
    for seed in (None, *range(6)):
        device = CheckedDevice(CpuDevice(seed=seed))
        outcome = run_on(device, guided(), depth=depth, limits=limits)
        assert outcome.tokens == TRUTH
        assert outcome.reasons["f"] == "stop"
        assert (outcome.scheduler.counters.num_preemptions > 0) == (limits is SCARCE)


FORCING = {id: replace(rule, forces=rule.waits) for id, rule in RULES.items()}
FORCED_TRUTH = {request.id: toy_truth(request, FORCING.get(request.id)) for request in toy_requests()}


@pytest.mark.parametrize("limits", [LIMITS, SCARCE], ids=["room", "preempted"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_tokens_that_must_come_are_the_same_in_fewer_steps(depth: int, limits: Limits) -> None:
    """Whether they are fed at once or sampled one by one, whatever else runs."""
    for seed in (None, *range(4)):
        num_forced = []
        for chunk_cost in (0.0, 0.6, 99.0):
            device = CheckedDevice(CpuDevice(seed=seed))
            outcome = run_on(device, guided(FORCING), depth=depth, limits=limits, chunk_cost=chunk_cost)
            assert outcome.tokens == FORCED_TRUTH
            assert outcome.reasons["f"] == "stop"
            assert outcome.scheduler.rows.num_foreseen == 0
            counters = outcome.scheduler.counters
            assert counters.num_generated == sum(map(len, FORCED_TRUTH.values()))
            num_forced.append(counters.num_forced)
        assert num_forced[0] >= num_forced[1] > num_forced[2]  # beside a prompt they cost nothing: never quite 0


def test_one_row_takes_a_step_for_each_run_of_tokens_that_must_come() -> None:
    steps = {}
    for forces in (True, False):
        request = toy_request("a", [3, 1, 4], max_tokens=21)
        request.guide = Rule(8, forces=forces).guide()
        outcome = run_on(CpuDevice(seed=0), [request], depth=2)
        steps[forces] = outcome.scheduler.counters.num_steps
        assert outcome.tokens == {"a": toy_truth(request, Rule(8, forces=forces))}
    runs = [len(run_from(8, start)) for start in (0, 7, 14)]
    assert max(runs) > 1
    assert steps[False] - steps[True] == sum(max(length - 1, 0) for length in runs)


def test_rows_of_which_each_sample_counts_are_not_forced() -> None:
    """The tokens are the same, and come with their log-probabilities and penalties."""
    for params in ({"logprobs": 2}, {"presence_penalty": 1.0}):
        request = toy_request("a", [3, 1, 4], max_tokens=21, **params)
        request.guide = Rule(8, forces=True).guide()
        outcome = run_on(CpuDevice(seed=0), [request], depth=2)
        assert outcome.tokens == {"a": toy_truth(request, Rule(8, forces=True))}
        assert outcome.scheduler.counters.num_forced == 0


@pytest.mark.parametrize("chunk_cost", [0.0, 99.0])
def test_a_stop_token_that_must_come_but_may_not_yet_is_not_forced(chunk_cost: float) -> None:
    """The guide allows other tokens than those of its run, and one of them comes in place of the stop token."""
    rule = Rule(8, forces=True)
    run = run_from(8, 0)
    request = toy_request("a", [3, 1, 4], max_tokens=6, min_tokens=5)
    request.guide, request.stop_ids = rule.guide(), (run[1],)
    outcome = run_on(CpuDevice(seed=0), [request], depth=2, chunk_cost=chunk_cost)
    tokens = outcome.tokens["a"]
    assert outcome.reasons["a"] == "length"
    assert tokens[0] == run[0]
    assert run[1] not in tokens[:5]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_resumed_request_goes_on_as_its_guide_says(depth: int) -> None:
    for known in range(1, 6):
        request = toy_request("a", [3, 1, 4], max_tokens=6)
        request.guide = Rule(7).guide()
        truth = toy_truth(request, Rule(7))
        request.resume_after(int_array(truth[:known]))
        assert run_on(CpuDevice(seed=0), [request], depth=depth).tokens == {"a": truth}


class Broken:
    """A guide that raises in one of its calls."""

    waits, is_over = True, False

    def __init__(self, where: str) -> None:
        self._where = where

    def advance(self, tokens: IntArray) -> None:
        if self._where == "advance":
            raise KeyError("no such state")

    def fill(self, out: IntArray) -> None:
        out[:] = -1
        if self._where == "fill":
            raise KeyError("no such state")

    def forced(self) -> list[int]:
        if self._where == "forced":
            raise KeyError("no such state")
        return []


@pytest.mark.parametrize("where", ["advance", "fill", "forced"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_guide_that_raises_fails_its_own_request_only(depth: int, where: str) -> None:
    for seed in (None, 0, 1):
        requests = guided()
        victim = requests[4]
        victim.guide = Broken(where)
        errors: list[BaseException | None] = []
        outcome = run_noted(CheckedDevice(CpuDevice(seed=seed)), requests, depth, errors)
        assert outcome.reasons[victim.id] == "error"
        assert {id: tokens for id, tokens in outcome.tokens.items() if id != victim.id} == {
            id: tokens for id, tokens in TRUTH.items() if id != victim.id
        }
        assert [str(error) for error in errors if error is not None] == [
            f"the guide failed after {1 if where == 'advance' else 0} tokens: KeyError: 'no such state'"
        ]
        assert all(isinstance(error, ControlFailed) for error in errors if error is not None)


class Slow:
    """A guide that works for long on its masks from some token on."""

    is_over, waits = False, True

    def __init__(self, rule: Rule, first_slow: int) -> None:
        self._inner, self._left = rule.guide(), first_slow

    def advance(self, tokens: IntArray) -> None:
        self._inner.advance(tokens)
        self._left -= len(tokens)

    def fill(self, out: IntArray) -> None:
        until_s = time.thread_time() + (0.02 if self._left <= 0 else 0)
        while time.thread_time() < until_s:
            pass
        self._inner.fill(out)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_guide_that_is_slow_again_and_again_fails_its_own_request_only(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then its tokens are those that its masks allow."""
    monkeypatch.setattr("gapless.guides.masks.SLOW_S", 0.01)
    requests = guided()
    victim = requests[0]
    victim.guide = Slow(RULES[victim.id], first_slow=2)
    errors: list[BaseException | None] = []
    outcome = run_noted(CheckedDevice(CpuDevice(seed=1)), requests, depth, errors)
    assert outcome.reasons[victim.id] == "error"
    assert outcome.tokens == TRUTH | {victim.id: TRUTH[victim.id][: 2 + MAX_SLOW - 1]}
    (error,) = [error for error in errors if error is not None]
    assert isinstance(error, InvalidRequest)
    assert "too slow" in str(error)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_guide_may_be_slow_a_few_times(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.guides.masks.SLOW_S", 0.01)
    requests = guided()
    num_tokens = len(TRUTH["a"])
    requests[0].guide = Slow(RULES["a"], first_slow=num_tokens - MAX_SLOW + 1)
    assert run_on(CpuDevice(), requests, depth=depth).tokens == TRUTH


def run_noted(device: Device, requests: list[Request], depth: int, errors: list[BaseException | None]) -> Outcome:
    """As `run_on`, with the errors of what ended."""
    abort = Scheduler.abort

    def noted(self: Scheduler, request_id: str, reason: str = "abort", error: BaseException | None = None):  # type: ignore[no-untyped-def]
        errors.append(error)
        return abort(self, request_id, reason, error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "abort", noted)
        return run_on(device, requests, depth=depth)


class Spy:
    """A guide that allows everything, and notes what it hears."""

    waits = True

    def __init__(self, over_after: int | None = None) -> None:
        self.heard: list[list[int]] = []
        self._over_after = over_after

    @property
    def is_over(self) -> bool:
        return self._over_after is not None and sum(map(len, self.heard)) >= self._over_after

    def advance(self, tokens: IntArray) -> None:
        self.heard.append(tokens.tolist())

    def fill(self, out: IntArray) -> None:
        out[:] = -1


class Forbids:
    """A guide that allows nothing."""

    waits, is_over = True, False

    def advance(self, tokens: IntArray) -> None:
        pass

    def fill(self, out: IntArray) -> None:
        out[:] = 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_guide_that_allows_nothing_fails_its_own_request(depth: int) -> None:
    requests = guided()
    requests[4].guide = Forbids()
    outcome = run_on(CheckedDevice(CpuDevice(seed=2)), requests, depth=depth)
    assert (outcome.reasons["e"], outcome.tokens["e"]) == ("error", [])
    assert {**outcome.tokens, "e": TRUTH["e"]} == TRUTH


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_guide_hears_each_fact_once_and_no_overrun(depth: int) -> None:
    request = toy_request("a", [3, 1, 4], max_tokens=12)
    truth = toy_truth(request)
    request.stop_ids = (truth[7],)  # known too late to stop the next step
    request.guide = spy = Spy()
    outcome = run_on(CpuDevice(), [request], depth=depth)
    assert outcome.tokens == {"a": truth[:8]}
    assert [token for part in spy.heard for token in part] == truth[:7]
    assert outcome.scheduler.counters.num_overrun == (depth > 1)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [4, 5, 6])
def test_a_guide_that_is_over_ends_its_request(depth: int, max_tokens: int) -> None:
    """Also with the last token that may come: then nothing is missing."""
    request = toy_request("a", [3, 1, 4], max_tokens=max_tokens)
    request.guide = Spy(over_after=5)
    outcome = run_on(CpuDevice(seed=1), [request], depth=depth)
    expected = toy_truth(request)[:5], "length" if max_tokens == 4 else "stop"
    assert (outcome.tokens["a"], outcome.reasons["a"]) == expected
    assert outcome.scheduler.counters.num_overrun == (depth > 1 and max_tokens > 5)


def test_a_step_with_a_guide_has_at_most_one_before_it_and_none_behind() -> None:
    """Steps without guides keep the depth."""
    device = CpuDevice()
    notes: list[str] = []

    class Noted(LocalExecutor):
        def launch(self, plan: Plan):  # type: ignore[no-untyped-def]
            notes.append(f"launch {'open' if plan.is_split else 'whole'}")
            return super().launch(plan)

        def complete(self, ticket, fill_masks, calls=()):  # type: ignore[no-untyped-def]
            notes.append("complete")
            return super().complete(ticket, fill_masks, calls)

        def collect(self, ticket):  # type: ignore[no-untyped-def]
            notes.append("collect")
            return super().collect(ticket)

    request = toy_request("a", [3, 1, 4], max_tokens=4)
    request.guide = Rule(1).guide()
    run_toy(Noted(device, toy_runner(device, LIMITS), LIMITS, 3), [request], depth=3)
    steady = ["launch open", "collect", "complete"]
    assert notes == ["launch open", "complete", *steady * 3, "collect"]
    notes.clear()
    device = CpuDevice()
    run_toy(Noted(device, toy_runner(device, LIMITS), LIMITS, 3), [toy_request("b", [3, 1, 4], max_tokens=4)], depth=3)
    assert notes == [*["launch whole"] * 3, "collect", "launch whole", *["collect"] * 3]


def test_the_depth_may_change_while_plans_wait() -> None:
    """Also to 1, with an open step just launched."""

    class Changing:
        depth, decided, num_reduced = 3, False, 0

        def observe(self, plan: Plan) -> None:
            self.depth = (3, 1, 2, 1, 1)[plan.step % 5]

    device, waiting, finished = CheckedDevice(CpuDevice(seed=3)), guided(), dict[str, list[int]]()
    scheduler = Scheduler(LIMITS)

    def admit(idle: bool) -> bool:
        if waiting:
            scheduler.add(waiting.pop(0))
        return bool(waiting) or scheduler.has_requests

    def deliver(commit: Commit) -> None:
        for request in [item.request for item in commit.finished]:
            finished[request.id] = request.tokens[request.num_prompt :].tolist()

    run_loop(scheduler, LocalExecutor(device, toy_runner(device, LIMITS), LIMITS, 3), Changing(), admit, deliver)
    assert finished == TRUTH


def test_masks_are_filled_while_the_model_runs() -> None:
    """The model's half is held at a gate; its masks are filled all the same, and nothing is sampled."""
    device = CpuDevice()
    runner = toy_runner(device, LIMITS)
    gate, forward = threading.Event(), runner.forward
    runner.forward = lambda filled, packed: gate.wait(10) and forward(filled, packed)  # type: ignore[method-assign]
    executor = LocalExecutor(device, runner, LIMITS, 1)
    scheduler = Scheduler(LIMITS)
    request = toy_request("a", [3, 1, 4])
    request.guide = Rule(1).guide()
    scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    ticket = executor.complete(executor.launch(plan), Masks(scheduler).fill)
    assert ticket.slot is not None
    assert not ticket.slot.compute_over.query()
    gate.set()
    assert executor.collect(ticket).tolist() == toy_truth(request, Rule(1))[:1]
    executor.close()


def test_an_open_step_cannot_be_collected() -> None:
    device = CpuDevice()
    executor = LocalExecutor(device, toy_runner(device, LIMITS), LIMITS, 1)
    scheduler = Scheduler(LIMITS)
    request = toy_request("a", [3, 1, 4])
    request.guide = Rule(1).guide()
    scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    ticket = executor.launch(plan)
    with pytest.raises(AssertionError, match="step 1 is not complete"):
        executor.collect(ticket)
    executor.close()  # with an open step: it ends, and nothing waits for it


def test_a_plan_says_which_samples_get_a_mask() -> None:
    """One that never changes comes once; one that follows from a sample in flight makes the plan wait."""
    limits = make_limits()
    scheduler = Scheduler(limits)
    requests = [make_request(id, [1, 2], limits) for id in "abc"]
    requests[1].guide, requests[2].guide = Rule(1).guide(), Rule(1, waits=False).guide()
    for request in requests:
        scheduler.add(request)
    found = []
    for _ in range(3):
        plan = scheduler.schedule()
        assert plan is not None
        found.append((plan.mask_samples.tolist(), plan.waits))
    assert found == [([1, 2], False), ([1], True), ([1], True)]
    scheduler.commit(plan, int_array([1, 1, 1]))


def test_masks_of_rows_that_were_left_are_not_filled() -> None:
    limits = make_limits()
    scheduler, spy = Scheduler(limits), Spy()
    request = make_request("a", [1, 2], limits)
    request.guide = spy
    scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.abort("a")
    assert Masks(scheduler).fill(plan, np.zeros(4, np.int64), np.zeros((4, 2), np.int32)) == 0


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("failing", range(1, 12, 2))
def test_a_failed_step_before_an_open_one(depth: int, failing: int) -> None:
    for seed in (None, 0, 1):
        device = CpuDevice(seed=seed)
        runner = failing_runner(device, failing)
        outcome = run_toy(LocalExecutor(device, runner, LIMITS, depth), guided(), depth=depth)
        for id, tokens in outcome.tokens.items():
            assert tokens == (TRUTH[id][: len(tokens)] if outcome.reasons[id] == "error" else TRUTH[id])
        assert sum(reason == "error" for reason in outcome.reasons.values()) >= 1


def failing_runner(device: Device, failing: int):  # type: ignore[no-untyped-def]
    runner = toy_runner(device, LIMITS)

    def broken(work: Callable[..., None]) -> Callable[..., None]:
        def run(filled, *rest) -> None:  # type: ignore[no-untyped-def]
            if filled.plan.step == failing:
                raise RuntimeError("no")
            work(filled, *rest)

        return run

    runner.step, runner.sample = broken(runner.step), broken(runner.sample)  # type: ignore[method-assign]
    return runner
