"""Many replicas and one router, as discrete events on one heap: a step of a replica ends, or a request arrives."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gapless.core.limits import Limits
from gapless.errors import InvalidRequest
from gapless.sim.arrivals import Arrival
from gapless.sim.costs import Costs
from gapless.sim.replica import ReplicaTotals, Served, SimReplica


class Router(Protocol):
    """Chooses a replica for each request."""

    def choose(self, arrival: Arrival) -> int: ...

    def ended(self, replica: int, count: int) -> None: ...


class RandomRouter:
    """Any replica, from a seed."""

    def __init__(self, num_replicas: int, seed: int) -> None:
        self._draw, self._count = random.Random(seed), num_replicas

    def choose(self, arrival: Arrival) -> int:
        return self._draw.randrange(self._count)

    def ended(self, replica: int, count: int) -> None:
        pass


class LoadRouter:
    """The replica with the fewest unfinished requests; among equals, the one that was chosen longest ago."""

    def __init__(self, num_replicas: int, seed: int) -> None:
        self._heap = [(0, number, number) for number in range(num_replicas)]  # load, turn, replica; may be outdated
        self._load = [0] * num_replicas
        self._turn = num_replicas

    def choose(self, arrival: Arrival) -> int:
        while True:
            load, _, replica = heapq.heappop(self._heap)
            if load == self._load[replica]:
                break
        self._set(replica, load + 1)
        return replica

    def ended(self, replica: int, count: int) -> None:
        if count:
            self._set(replica, self._load[replica] - count)

    def _set(self, replica: int, load: int) -> None:
        self._load[replica] = load
        self._turn += 1
        heapq.heappush(self._heap, (load, self._turn, replica))


ROUTERS: dict[str, Callable[[int, int], Router]] = {"random": RandomRouter, "load": LoadRouter}


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """What is simulated."""

    limits: Limits
    costs: Costs
    replicas: int = 1
    depth: int = 2
    max_step_s: float = 0.2
    routing: str = "load"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FleetRun:
    """The results of a simulation."""

    options: FleetOptions
    served: tuple[Served, ...]
    num_refused: int  # too long for the limits
    refusal: str  # the first reason
    totals: tuple[ReplicaTotals, ...]
    num_preemptions: int
    end_s: float  # when the last request ended
    took_s: float  # on this machine


def simulate(
    arrivals: Sequence[Arrival], options: FleetOptions, tell: Callable[[int], None] = lambda count: None
) -> FleetRun:
    """Play all requests. tell: called with the number of requests that ended."""
    began = time.perf_counter()
    router = ROUTERS[options.routing](options.replicas, options.seed)
    made = (options.limits, options.costs, options.depth, options.max_step_s)
    replicas = [SimReplica(number, *made) for number in range(options.replicas)]
    heap: list[tuple[float, int]] = []  # end of the oldest step of each busy replica
    served: list[Served] = []
    refusals: list[str] = []
    end_s, number = 0.0, 0
    while heap or number < len(arrivals):
        if number < len(arrivals) and (not heap or arrivals[number].at_s <= heap[0][0]):
            arrival = arrivals[number]
            replica = replicas[router.choose(arrival)]
            was_idle = replica.next_s is None
            try:
                served.append(replica.submit(arrival, number, arrival.at_s))
            except InvalidRequest as error:
                refusals.append(str(error))
                router.ended(replica.number, 1)
            number += 1
            if was_idle and replica.next_s is not None:
                heapq.heappush(heap, (replica.next_s, replica.number))
            continue
        end_s, index = heap[0]
        count = replicas[index].collect()
        router.ended(index, count)
        tell(count)
        if (next_s := replicas[index].next_s) is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (next_s, index))
    return FleetRun(
        options,
        tuple(served),
        len(refusals),
        refusals[0] if refusals else "",
        tuple(replica.totals for replica in replicas),
        sum(replica.scheduler.counters.num_preemptions for replica in replicas),
        end_s,
        time.perf_counter() - began,
    )
