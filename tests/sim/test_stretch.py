"""Steps that are skipped leave everything as steps that are played."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from gapless.core.limits import Limits
from gapless.sim.arrivals import Arrival, prompt_of
from gapless.sim.costs import Costs
from gapless.sim.fleet import FleetOptions, FleetRun, simulate
from gapless.sim.replica import Served, SimReplica

COSTS = Costs((0.010, 0.003, 0.0007, 0.000003, 0.0001, 1e-8), 0, 0.0, 0.0)
ROOMY, TIGHT = Limits(8, 400, 16, 128, 600), Limits(8, 48, 16, 128, 600)


def trace(seed: int, count: int = 60) -> list[Arrival]:
    """Bursts and pauses; half of the prompts begin alike, some are equal, some answers are very short."""
    draw, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.choice([0.0, 0.004, 0.3, 1.5])
        hashes = tuple(range(draw.randrange(5))) if draw.random() < 0.5 else ()
        found.append(Arrival(now, draw.randrange(1, 200), draw.choice([1, 2, 3, 17, 60, 300]), hashes, 32))
    return found


def both(arrivals: list[Arrival], options: FleetOptions) -> tuple[FleetRun, FleetRun]:
    return simulate(arrivals, options), simulate(arrivals, dataclasses.replace(options, skips=False))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("limits", [ROOMY, TIGHT, dataclasses.replace(ROOMY, prefix_cache=False)])
@pytest.mark.parametrize("replicas", [1, 3])
def test_skipped_steps_equal_played_ones(depth: int, limits: Limits, replicas: int) -> None:
    options = FleetOptions(limits, COSTS, replicas, depth, math.inf if depth == 3 else 0.03)
    fast, slow = both(trace(depth + replicas), options)
    assert len(fast.served) == len(slow.served) > 0
    for one, other in zip(fast.served, slow.served, strict=True):
        assert (one.replica, one.num_cached) == (other.replica, other.num_cached)
        assert (one.first_s, one.end_s) == pytest.approx((other.first_s, other.end_s))
    assert fast.num_preemptions == slow.num_preemptions
    for mine, theirs in zip(fast.totals, slow.totals, strict=True):
        assert (mine.num_steps, mine.num_rows, mine.most_blocks) == (
            theirs.num_steps,
            theirs.num_rows,
            theirs.most_blocks,
        )
        assert (mine.busy_s, mine.work_s, mine.chunk_s, *mine.waited_s) == pytest.approx(
            (theirs.busy_s, theirs.work_s, theirs.chunk_s, *theirs.waited_s)
        )


def test_the_tight_case_preempts() -> None:
    """Otherwise the comparison above would say little."""
    assert simulate(trace(3), FleetOptions(TIGHT, COSTS, 1, 2, 0.03)).num_preemptions > 0


def test_the_scheduler_is_whole_after_every_event() -> None:
    replica = SimReplica(0, ROOMY, COSTS, 2, 0.03)
    num_events, waiting = 0, trace(7, 40)
    served: list[Served] = []
    while waiting or replica.next_s is not None:
        if waiting and (replica.next_s is None or waiting[0].at_s <= replica.next_s):
            arrival = waiting.pop(0)
            served.append(replica.submit(arrival, prompt_of(arrival, len(served)), len(served)))
        else:
            replica.collect()
        num_events += 1
        replica.scheduler.check()
    assert replica.totals.num_steps > 3 * num_events, "most steps were skipped"
    assert replica.scheduler.counters.num_steps == replica.totals.num_steps
    assert replica.scheduler.counters.num_generated == sum(each.arrival.num_output for each in served)
