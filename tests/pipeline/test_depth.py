"""How "auto" finds the faster depth, on a clock of our own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gapless.core.plan import Plan
from gapless.pipeline.depth import NUM_ROUNDS, SETTLING_STEPS, STEPS_A_ROUND, AutoDepth, FixedDepth


class World:
    """A clock that moves by what a step costs at the depth in use."""

    def __init__(self, cost_s: dict[int, float], candidates: tuple[int, ...] = (1, 2)) -> None:
        self.now_s = 0.0
        self.cost_s = cost_s
        self.auto = AutoDepth(candidates, clock=lambda: self.now_s)
        self.tried: list[int] = []

    def step(self, num_decodes: int = 4, *, chunks: int = 0, extra_s: float = 0.0) -> None:
        self.tried.append(self.auto.depth)
        self.now_s += self.cost_s[self.auto.depth] + extra_s
        self.auto.observe(plan(num_decodes, chunks))


def plan(num_decodes: int, chunks: int = 0) -> Plan:
    return SimpleNamespace(num_decodes=num_decodes, chunks=[None] * chunks)  # type: ignore[return-value]


@pytest.mark.parametrize(("cost_s", "best"), [({1: 0.010, 2: 0.007}, 2), ({1: 0.007, 2: 0.010}, 1)])
def test_it_keeps_the_faster(cost_s: dict[int, float], best: int) -> None:
    world = World(cost_s)
    for _ in range(STEPS_A_ROUND * NUM_ROUNDS * 2 + 1):
        assert not world.auto.decided
        world.step()
    assert (world.auto.decided, world.auto.depth) == (True, best)
    world.cost_s = {1: 1.0, 2: 1.0}
    for _ in range(100):
        world.step()
    assert world.auto.depth == best


def test_it_tries_in_turns() -> None:
    world = World({1: 0.01, 2: 0.01, 3: 0.01}, (1, 2, 3))
    for _ in range(STEPS_A_ROUND * NUM_ROUNDS * 3 + 1):
        world.step()
    rounds = [1, *(depth for _ in range(NUM_ROUNDS) for depth in (1, 2, 3) for _ in range(STEPS_A_ROUND))]
    assert world.tried == rounds


def test_one_slow_step_does_not_decide() -> None:
    world = World({1: 0.010, 2: 0.007})
    for number in range(STEPS_A_ROUND * NUM_ROUNDS * 2 + 1):
        world.step(extra_s=1.0 if world.auto.depth == 2 and number % STEPS_A_ROUND == STEPS_A_ROUND - 3 else 0.0)
    assert (world.auto.decided, world.auto.depth) == (True, 2)


def test_the_first_steps_of_a_round_do_not_count() -> None:
    """At depth 2 a round's first steps are slow, and of the others just more than half are faster than at depth 1."""
    world = World({1: 0.010, 2: 0.009})
    less_than_half = (STEPS_A_ROUND - SETTLING_STEPS - 1) // 2
    world.step()
    for number in range(STEPS_A_ROUND * NUM_ROUNDS * 2):
        place = number % STEPS_A_ROUND
        slow_s = 0.011 if place < SETTLING_STEPS else 0.002 if place < SETTLING_STEPS + less_than_half else 0.0
        world.step(extra_s=slow_s if world.auto.depth == 2 else 0.0)
    assert (world.auto.decided, world.auto.depth) == (True, 2)


def test_only_decodes_of_an_unchanging_batch_are_timed() -> None:
    world = World({1: 0.01, 2: 0.01})
    for number in range(500):
        world.step(num_decodes=number % 2 + 1)
    for _ in range(500):
        world.step(chunks=1)
    assert not world.auto.decided
    assert set(world.tried) == {1}


def test_a_fixed_depth_stays() -> None:
    fixed = FixedDepth(3)
    fixed.observe(plan(4))
    assert (fixed.depth, fixed.decided) == (3, True)
