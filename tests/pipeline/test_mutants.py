"""Every mistake of the table is seen, and the pipeline without a mistake passes."""

from __future__ import annotations

from functools import cache, partial
from itertools import product

import pytest
from mutants import MISTAKES, CountingRunner, Mistake, Mutant

from gapless.core.scheduler import Scheduler
from gapless.device.base import Device
from gapless.device.checker import CheckedDevice
from gapless.device.cpu import CpuDevice
from gapless.errors import RaceError
from gapless.pipeline.executor import LocalExecutor
from gapless.proof.rule import Rule
from toy import LIMITS, run_on, toy_request, toy_requests, toy_runner, toy_truth

SEEDS = range(12)


@cache
def truth(rule: Rule | None) -> dict[str, list[int]]:
    return {request.id: toy_truth(request, rule) for request in toy_requests()}


each_mistake = pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "-"))


def run(mistake: Mistake, device: Device, depth: int = 2) -> dict[str, list[int]]:
    make, requests = partial(mistake.make, edit=mistake.edit()), toy_requests()
    for request in requests:
        request.guide = None if mistake.rule is None else mistake.rule.guide()
    return dict(run_on(device, requests, depth=depth, make=make).tokens)


@each_mistake
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_the_checker_sees(mistake: Mistake, seed: int | None) -> None:
    device = CheckedDevice(CpuDevice(seed=seed))
    if mistake.race:
        with pytest.raises(RaceError, match="with no event after"):
            run(mistake, device)
    else:
        run(mistake, device)


@each_mistake
def test_some_interleaving_shows_in_the_tokens(mistake: Mistake) -> None:
    wrong = any(run(mistake, CpuDevice(seed=seed)) != truth(mistake.rule) for seed in SEEDS)
    assert wrong == mistake.tokens


@pytest.mark.parametrize("mistake", [mistake for mistake in MISTAKES if not mistake.race], ids=lambda m: m.name)
def test_a_step_that_comes_back_too_late_is_seen(mistake: Mistake) -> None:
    assert overlaps(LocalExecutor)
    assert overlaps(partial(mistake.make, edit=mistake.edit())) == (not mistake.stall)


def overlaps(make) -> bool:
    """Whether under some seed the first of two launched steps comes back before the second has run."""
    for seed in SEEDS:
        device = CpuDevice(seed=seed)
        runner = CountingRunner(toy_runner(device, LIMITS))
        executor = make(device, runner, LIMITS, 2)
        scheduler = Scheduler(LIMITS)
        scheduler.add(toy_request("a", [1, 2, 3]))
        tickets = [executor.launch(scheduler.schedule()) for _ in range(2)]
        executor.collect(tickets[0])
        if runner.num_steps == 1:
            return True
    return False


def test_every_mistake_is_seen_by_somebody() -> None:
    assert all(mistake.race or mistake.tokens or mistake.stall for mistake in MISTAKES)
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_without_a_mistake_nothing_is_seen(depth: int) -> None:
    """Also proves that the scripted device by itself changes nothing."""
    for seed, rule in product((None, *SEEDS), (None, Rule(1), Rule(1, waits=False))):
        device = CheckedDevice(CpuDevice(seed=seed))
        assert run(Mistake("none", rule=rule), device, depth) == truth(rule)
        assert device.checker.num_accesses > 100
    assert run(Mistake("none", Mutant), CpuDevice(), depth) == truth(None)


def test_a_depth_beyond_the_number_of_slots_fails_loudly() -> None:
    device = CpuDevice(seed=0)
    executor = LocalExecutor(device, toy_runner(device, LIMITS), LIMITS, 1)
    scheduler = Scheduler(LIMITS)
    scheduler.add(toy_request("a", [1, 2, 3]))
    executor.launch(scheduler.schedule())
    with pytest.raises(IndexError):
        executor.launch(scheduler.schedule())
