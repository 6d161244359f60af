"""Simulated replicas keep time as an engine does, and the figures name what held them up."""

from __future__ import annotations

import dataclasses
import math

import pytest

from gapless.core.limits import Limits
from gapless.sim.arrivals import Arrival
from gapless.sim.costs import Costs
from gapless.sim.figures import SimFigures, figures_of
from gapless.sim.fleet import FleetOptions, FleetRun, simulate

STEP_S, TOKEN_S = 0.010, 0.0001
COSTS = Costs((STEP_S, 0.0, 0.0, 0.0, TOKEN_S, 0.0), 0, 0.0, 0.0)
LIMITS = Limits(4, 400, 16, 512, 1024)
OPTIONS = FleetOptions(LIMITS, COSTS, max_step_s=math.inf)


def figures(run: FleetRun) -> SimFigures:
    return figures_of(run, ranks=2, price=3.0)


@pytest.mark.parametrize("depth", [1, 2])
def test_one_request_takes_its_steps(depth: int) -> None:
    run = simulate([Arrival(0.0, 100, 11)], dataclasses.replace(OPTIONS, depth=depth))
    (served,) = run.served
    assert served.first_s == pytest.approx(STEP_S + 100 * TOKEN_S)
    assert served.end_s == pytest.approx(served.first_s + 10 * STEP_S)
    assert run.totals[0].num_steps == 11


def test_a_request_that_comes_during_a_step_waits_for_those_in_flight() -> None:
    first, second = Arrival(0.0, 100, 50), Arrival(0.0251, 100, 1)
    late = {}
    for depth in (1, 2):
        run = simulate([first, second], dataclasses.replace(OPTIONS, depth=depth))
        late[depth] = run.served[1].first_s
    assert late[1] == pytest.approx(0.030 + STEP_S + 100 * TOKEN_S)
    assert late[2] == pytest.approx(late[1] + STEP_S), "one more step was already launched"


def test_shared_prefixes_are_hits() -> None:
    arrivals = [Arrival(at_s, 64, 2, (1, 2), 32) for at_s in (0.0, 1.0)]
    run = simulate(arrivals, OPTIONS)
    assert [served.num_cached for served in run.served] == [0, 48]  # the last token is always computed
    without = dataclasses.replace(OPTIONS, limits=dataclasses.replace(LIMITS, prefix_cache=False))
    assert figures(simulate(arrivals, without)).cached_share == 0


def test_load_routing_spreads_and_random_does_not() -> None:
    burst = [Arrival(0.0, 50, 20) for _ in range(32)]
    even = simulate(burst, dataclasses.replace(OPTIONS, replicas=8))
    uneven = simulate(burst, dataclasses.replace(OPTIONS, replicas=8, routing="random"))
    assert [sum(s.replica == n for s in even.served) for n in range(8)] == [4] * 8
    assert figures(even).ttft.p99 < figures(uneven).ttft.p99
    assert figures(uneven).bottleneck.startswith("routing")


@pytest.mark.parametrize(
    ("limits", "arrivals", "cause"),
    [
        (LIMITS, [Arrival(0.0, 10, 100)] * 40, "rows"),
        (Limits(64, 30, 16, 512, 480), [Arrival(0.0, 100, 100)] * 40, "KV memory"),
        (Limits(64, 4000, 16, 512, 1024), [Arrival(0.0, 1000, 1)] * 40, "compute"),
        (Limits(64, 4000, 16, 512, 1024), [Arrival(n / 2, 10, 2) for n in range(20)], "none"),
        (Limits(64, 4000, 16, 512, 1024), [Arrival(0.0, 10, 900)], "none yet: 2% of the capacity"),
        (Limits(64, 4000, 16, 512, 1024), [Arrival(0.0, 1, 900)] * 64, "compute: 100% of the capacity"),
    ],
)
def test_bottlenecks(limits: Limits, arrivals: list[Arrival], cause: str) -> None:
    assert figures(simulate(arrivals, dataclasses.replace(OPTIONS, limits=limits))).bottleneck.startswith(cause)


def test_figures() -> None:
    found = figures(simulate([Arrival(0.0, 100, 11), Arrival(1.0, 2000, 5)], OPTIONS))
    assert (found.num_requests, found.num_refused) == (1, 1)
    assert found.seconds == pytest.approx(0.12)
    assert found.output_tokens_per_s == pytest.approx(11 / 0.12)
    assert found.tpot.p50 == pytest.approx(STEP_S)
    assert found.cost == pytest.approx(3.0 * 2 * 0.12 / 3600)
    assert found.busy_share == pytest.approx(1.0)


def test_nothing_leaks() -> None:
    arrivals = [Arrival(n * 0.003, 20 + n % 70, 1 + n % 30) for n in range(200)]
    run = simulate(arrivals, dataclasses.replace(OPTIONS, limits=Limits(8, 40, 16, 64, 200), max_step_s=0.02))
    assert len(run.served) == 200
    assert run.num_preemptions > 0
    assert all(each.arrival.at_s < each.first_s <= each.end_s for each in run.served)


def test_a_router_that_is_too_slow_is_the_bottleneck() -> None:
    run = simulate([Arrival(0.0, 100, 11)], OPTIONS)
    assert 0 < figures(run).route_us < 1e5
    slow = figures(dataclasses.replace(run, router_s=0.7 * run.end_s))
    assert slow.router_share == pytest.approx(0.7)
    assert slow.bottleneck.startswith("the router")
