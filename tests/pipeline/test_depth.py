"""How "auto" finds and follows the best depth, on a clock of our own."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from gapless.core.plan import Plan
from gapless.pipeline.depth import LOOKS, PAUSE_S, SETTLING_STEPS, STEPS_A_ROUND, AutoDepth, FixedDepth

A_PAIR = 2 * (SETTLING_STEPS + STEPS_A_ROUND)  # steps in two rounds
FIRST = 2 * LOOKS[0] * A_PAIR  # steps that the first two trials take without noise


def plan(num_decodes: int, num_prompt_tokens: int = 0) -> Plan:
    values = {"num_decodes": num_decodes, "num_tokens": num_decodes + num_prompt_tokens}
    return SimpleNamespace(**values)  # type: ignore[return-value]


class World:
    """The loop with a host and a device that take the times they are given: launch, then wait for the oldest steps."""

    def __init__(self, host_ms: Callable[[], float], *, mixed: bool = False, noise: float = 0.0, seed: int = 0) -> None:
        self.now_s = self.device_free_s = 0.0
        self.host_ms, self.mixed, self.noise = host_ms, mixed, noise
        self.draw = random.Random(seed)
        self.auto: AutoDepth | FixedDepth = AutoDepth(clock=lambda: self.now_s)
        self.ends: deque[float] = deque()
        self.tried: list[int] = []

    def step(self) -> None:
        self.tried.append(self.auto.depth)
        prompt_tokens = self.draw.choice([0, 0, 0, 200, 900]) if self.mixed else 0
        device_ms = (2 + 0.01 * prompt_tokens) * self.draw.uniform(1 - self.noise, 1 + self.noise)
        self.now_s += self.host_ms() / 1e3
        self.device_free_s = max(self.device_free_s, self.now_s) + device_ms / 1e3
        self.ends.append(self.device_free_s)
        self.auto.observe(plan(4, prompt_tokens))
        while len(self.ends) >= self.auto.depth:
            self.now_s = max(self.now_s, self.ends.popleft())

    def run(self, num_steps: int) -> int:
        """The depth after some more steps, outside trials."""
        for _ in range(num_steps):
            self.step()
        while not self.auto.decided:
            self.step()
        return self.auto.depth

    def run_for(self, seconds: float) -> int:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.step()
        return self.run(0)


def steady(milliseconds: float) -> Callable[[], float]:
    return lambda: milliseconds


def jerky(seed: int = 0) -> Callable[[], float]:
    """A busy host: mostly fast, and every seventh time slower than the step that is queued meanwhile."""
    draw = random.Random(seed)
    return lambda: draw.choice([0.3] * 6 + [5.0])


@pytest.mark.parametrize("mixed", [False, True])
def test_the_lowest_depth_that_is_as_fast(mixed: bool) -> None:
    assert World(steady(0.4), mixed=mixed).run(FIRST) == 2
    assert World(steady(0.005), mixed=mixed).run(FIRST) == 1  # 0.25% of a step
    assert World(jerky(), mixed=mixed, noise=0.02).run_for(120) == 3


def test_it_begins_with_two_and_says_so_until_it_has_tried_both_neighbours() -> None:
    world = World(steady(0.4))
    assert world.auto.depth == 2
    while not world.auto.decided:
        world.step()
    assert set(world.tried) == {1, 2, 3}
    assert world.tried.count(1) <= A_PAIR / 2  # hopeless, so one round only
    assert len(world.tried) <= (1 + LOOKS[0]) * A_PAIR + 2
    assert world.auto.num_reduced == 0


def test_it_follows_a_change() -> None:
    world = World(steady(0.4))
    assert world.run_for(30) == 2
    world.host_ms = jerky()
    assert world.run_for(120) == 3
    world.host_ms = steady(0.005)
    assert world.run_for(120) == 1
    assert world.auto.num_reduced == 2
    world.host_ms = steady(0.4)
    assert world.run_for(60) == 2
    assert world.auto.num_reduced == 2


@pytest.mark.parametrize("seed", range(5))
def test_noise_changes_nothing_and_trials_cost_little(seed: int) -> None:
    """Steps differ by up to 40% for no reason, depth 1 is slower, and depth 3 brings nothing."""
    world, fixed = (World(steady(0.4), mixed=True, noise=0.4, seed=seed) for _ in range(2))
    fixed.auto = FixedDepth(2)
    for _ in range(50_000):
        world.step()
        fixed.step()
    assert world.now_s < 1.005 * fixed.now_s
    assert world.tried.count(2) > 0.95 * len(world.tried)
    assert world.tried.count(1) > 0
    assert world.auto.num_reduced == 0


def test_a_stall_does_not_decide() -> None:
    world = World(steady(0.4))
    for number in range(FIRST):
        if number == SETTLING_STEPS + 3:  # while it is at home, so that rivals look better
            world.now_s += 1.0
        world.step()
    assert world.run(0) == 2


def test_an_empty_pipeline_ends_a_trial_without_a_result() -> None:
    """Requests one by one, each too short for a trial: their waits are no times of steps."""
    world = World(steady(0.4))
    for _ in range(40):
        world.now_s += 10.0
        world.auto.observe(plan(0, 100))
        for _ in range(SETTLING_STEPS + 2):
            world.step()
        world.auto.observe(plan(0, 100))
        assert world.auto.depth == 2
    assert not world.auto.decided
    assert set(world.tried) == {2}


def test_a_later_trial_that_is_cut_off_leaves_the_depth_final() -> None:
    """Both neighbours were tried before: the depth is what it was, and only a trial under way leaves it open."""
    world = World(steady(0.4))
    world.run(FIRST)
    while world.auto.decided:
        world.step()
    world.auto.observe(plan(0, 100))
    assert world.auto.decided
    assert world.auto.depth == 2


def test_there_is_a_pause_between_trials() -> None:
    world = World(steady(0.4))
    world.run(FIRST)
    began_s = world.now_s
    while world.auto.decided:
        world.step()
    assert world.now_s - began_s > PAUSE_S - FIRST * 2.1e-3
    assert world.run(0) == 2


def test_a_fixed_depth_stays() -> None:
    fixed = FixedDepth(3)
    fixed.observe(plan(4))
    assert (fixed.depth, fixed.decided) == (3, True)
