"""Many replicas and one router, as discrete events on one heap: a step of a replica ends, or a request arrives."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gapless.core.limits import Limits
from gapless.distributed.router import Router
from gapless.errors import InvalidRequest
from gapless.garbage import collections_paused
from gapless.sim.arrivals import Arrival, prompt_of
from gapless.sim.costs import Costs
from gapless.sim.replica import ReplicaTotals, Served, SimReplica


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """What is simulated."""

    limits: Limits
    costs: Costs
    replicas: int = 1
    depth: int = 2
    max_step_s: float = 0.2
    routing: str = "prefix"
    seed: int = 0
    skips: bool = True  # steps in which nothing changes but lengths; False: step by step, with the same results


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
    router_s: float  # processor time of the router on this machine
    took_s: float  # on this machine


def simulate(
    arrivals: Sequence[Arrival], options: FleetOptions, tell: Callable[[int], None] = lambda count: None
) -> FleetRun:
    """Play all requests. tell: called with the number of requests that ended."""
    with collections_paused():  # cached blocks are many objects, and none is part of a cycle
        return _simulate(arrivals, options, tell)


def _simulate(arrivals: Sequence[Arrival], options: FleetOptions, tell: Callable[[int], None]) -> FleetRun:
    began = time.perf_counter()
    router = Router(options.routing, seed=options.seed)
    made = (options.limits, options.costs, options.depth, options.max_step_s)
    replicas = [SimReplica(number, *made, skips=options.skips) for number in range(options.replicas)]
    for replica in replicas:
        router.join(str(replica.number), replica.cache_tokens)
    heap: list[tuple[float, int]] = []  # next event of each busy replica; some are outdated
    served: list[Served] = []
    refusals: list[str] = []
    end_s, router_s, number = 0.0, 0.0, 0
    while heap or number < len(arrivals):
        if number < len(arrivals) and (not heap or arrivals[number].at_s <= heap[0][0]):
            arrival = arrivals[number]
            prompt = prompt_of(arrival, number)
            asked_s = time.thread_time()
            route = router.route(str(number), prompt)
            router_s += time.thread_time() - asked_s
            replica = replicas[int(route.replica)]
            before_s = replica.next_s
            try:
                served.append(replica.submit(arrival, prompt, number))
            except InvalidRequest as error:
                refusals.append(str(error))
                router.finished(str(number))
            number += 1
            if replica.next_s is not None and replica.next_s != before_s:
                heapq.heappush(heap, (replica.next_s, replica.number))
            continue
        next_s, index = heap[0]
        if next_s != replicas[index].next_s:
            heapq.heappop(heap)
            continue
        end_s = next_s
        heard = replicas[index].collect()
        for request_id in heard.started:
            router.started(request_id)
        for request_id in heard.finished:
            router.finished(request_id)
        tell(len(heard.finished))
        if (then_s := replicas[index].next_s) is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (then_s, index))
    return FleetRun(
        options,
        tuple(served),
        len(refusals),
        refusals[0] if refusals else "",
        tuple(replica.totals for replica in replicas),
        sum(replica.scheduler.counters.num_preemptions for replica in replicas),
        end_s,
        router_s,
        time.perf_counter() - began,
    )
