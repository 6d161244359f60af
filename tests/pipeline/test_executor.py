"""Launch only queues, collect is the only wait, and a failed step is its own affair."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from gapless.core.plan import Plan
from gapless.core.scheduler import Scheduler
from gapless.device.cpu import CpuDevice
from gapless.errors import GaplessError, RaceError, StepFailed
from gapless.pipeline.executor import LocalExecutor, StepRunner
from gapless.runner.fill import Filled
from toy import LIMITS, run_toy, toy_request, toy_requests, toy_runner, toy_truth

TIMEOUT_S = 10.0


class Spy:
    """A runner that can be held at a gate, and raises at chosen steps."""

    def __init__(self, inner: StepRunner, failures: dict[int, Exception] | None = None) -> None:
        self._inner = inner
        self._failures = failures or {}
        self.buffers, self.mask_words, self.fill, self.sample = (
            inner.buffers,
            inner.mask_words,
            inner.fill,
            inner.sample,
        )
        self.gate = threading.Event()
        self.gate.set()
        self.ran: list[int] = []

    def step(self, filled: Filled, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        self._pass(filled.plan.step)
        self._inner.step(filled, packed_plan, out)

    def forward(self, filled: Filled, packed_plan: torch.Tensor) -> None:
        self._pass(filled.plan.step)
        self._inner.forward(filled, packed_plan)

    def _pass(self, step: int) -> None:
        assert self.gate.wait(TIMEOUT_S)
        self.ran.append(step)
        if step in self._failures:
            raise self._failures[step]


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


def two_plans() -> tuple[Scheduler, list[Plan]]:
    scheduler = Scheduler(LIMITS)
    scheduler.add(toy_request("a", [1, 2, 3]))
    plans = [scheduler.schedule() for _ in range(2)]
    assert all(plans)
    return scheduler, plans  # type: ignore[return-value]


def test_launch_does_not_wait_and_collect_does(device: CpuDevice) -> None:
    spy = Spy(toy_runner(device, LIMITS))
    executor = LocalExecutor(device, spy, LIMITS, 2)
    spy.gate.clear()
    _, plans = two_plans()
    tickets = [executor.launch(plan) for plan in plans]  # would stand still if it waited
    assert spy.ran == []
    assert not tickets[0].slot.d2h_over.query()
    spy.gate.set()
    truth = toy_truth(toy_request("a", [1, 2, 3]))
    assert [executor.collect(ticket).tolist() for ticket in tickets] == [[truth[0]], [truth[1]]]
    assert spy.ran == [1, 2]


def test_collect_waits_for_its_own_step_only(device: CpuDevice) -> None:
    spy = Spy(toy_runner(device, LIMITS))
    executor = LocalExecutor(device, spy, LIMITS, 2)
    _, plans = two_plans()
    first = executor.launch(plans[0])
    while not first.slot.d2h_over.query():
        pass
    spy.gate.clear()
    second = executor.launch(plans[1])
    assert len(executor.collect(first)) == 1  # the second stands at the gate
    assert not second.slot.d2h_over.query()
    spy.gate.set()
    executor.collect(second)


def test_the_tokens_outlive_the_slot(device: CpuDevice) -> None:
    """What collect gives is the caller's; the slot's next step does not change it."""
    executor = LocalExecutor(device, toy_runner(device, LIMITS), LIMITS, 1)
    _, plans = two_plans()
    first = executor.collect(executor.launch(plans[0]))
    before = first.tolist()
    second = executor.collect(executor.launch(plans[1]))
    assert (first.tolist(), second.tolist() != before) == (before, True)


def test_a_step_that_raises_fails_alone_and_frees_its_slot(device: CpuDevice) -> None:
    spy = Spy(toy_runner(device, LIMITS), {1: RuntimeError("out of paper")})
    executor = LocalExecutor(device, spy, LIMITS, 2)
    _, plans = two_plans()
    tickets = [executor.launch(plan) for plan in plans]
    with pytest.raises(StepFailed, match="step 1 failed on the device: out of paper") as caught:
        executor.collect(tickets[0])
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert isinstance(caught.value, GaplessError)
    assert len(executor.collect(tickets[1])) == 1  # ran, though on rows that step 1 left as they were
    for plan in plans:  # both slots are back
        executor.launch(plan)


def test_a_step_that_raises_while_it_is_queued_fails_at_collect(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA runs a step's Python code in `launch`; what it raises there is the step's own failure too."""
    executor = LocalExecutor(device, toy_runner(device, LIMITS), LIMITS, 2)
    _, plans = two_plans()

    def run_at_once(fn: Callable[[], None], label: str, **buffers: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(device.stream("compute"), "run", run_at_once)
        ticket = executor.launch(plans[0])
    with pytest.raises(StepFailed, match="step 1 failed on the device: out of memory"):
        executor.collect(ticket)
    executor.collect(executor.launch(plans[1]))  # the slot came back, and the device goes on


def test_a_race_is_our_bug_and_no_failed_step(device: CpuDevice) -> None:
    spy = Spy(toy_runner(device, LIMITS), {1: RaceError("found one")})  # type: ignore[dict-item]
    executor = LocalExecutor(device, spy, LIMITS, 1)
    _, plans = two_plans()
    with pytest.raises(RaceError, match="found one"):
        executor.collect(executor.launch(plans[0]))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("failing", range(1, 14, 2))
def test_a_failed_step_fails_its_own_requests_and_the_others_are_right(depth: int, failing: int) -> None:
    for seed in (None, 0, 1):
        device = CpuDevice(seed=seed)
        spy = Spy(toy_runner(device, LIMITS), {failing: RuntimeError("no")})
        outcome = run_toy(LocalExecutor(device, spy, LIMITS, depth), toy_requests(), depth=depth)
        for request in toy_requests():
            truth = toy_truth(request)
            if outcome.reasons[request.id] == "error":
                assert outcome.tokens[request.id] == truth[: len(outcome.tokens[request.id])]
            else:
                assert outcome.tokens[request.id] == truth
        assert 1 <= sum(reason == "error" for reason in outcome.reasons.values()) <= LIMITS.num_rows


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_device_that_always_fails_leaves_nobody_waiting(depth: int) -> None:
    device = CpuDevice(seed=0)
    spy = Spy(toy_runner(device, LIMITS), dict.fromkeys(range(1, 200), RuntimeError("lost")))
    outcome = run_toy(LocalExecutor(device, spy, LIMITS, depth), toy_requests(), depth=depth)
    assert set(outcome.reasons.values()) == {"error"}
    assert len(outcome.reasons) == len(toy_requests())
    assert len(spy.ran) < 100
