"""One simulated engine: the real scheduler, with a clock that jumps from the end of one step to the next.

Does what `pipeline.loop` does: plans until `depth` steps are in flight, then waits for the oldest. A request that comes
during this wait is planned after it. Steps run one after the other, as on one compute stream. Steps in which nothing
changes but lengths are skipped many at a time (`stretch`).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from gapless.core.limits import Limits
from gapless.core.pace import Pace
from gapless.core.params import SamplingParams
from gapless.core.plan import Plan
from gapless.core.request import IntArray, Request
from gapless.core.scheduler import Scheduler
from gapless.sim.arrivals import Arrival
from gapless.sim.costs import Costs, shape_of
from gapless.sim.stretch import TOKEN, DecodeStretch, find_stretch, skip

CAUSES = ("rows", "KV memory", "compute")  # why requests wait
ROWS, MEMORY, COMPUTE = range(len(CAUSES))


@dataclass(slots=True)
class Served:
    """What became of a request. Times are in seconds of the trace; NaN: not yet."""

    arrival: Arrival
    replica: int
    first_s: float = math.nan  # of the first token
    end_s: float = math.nan
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class SimStep:
    """A step in flight."""

    plan: Plan
    begin_s: float
    end_s: float
    work_s: float
    first: tuple[Request, ...]  # requests whose prompt ends in this step
    cause: int | None  # why others wait while it runs


@dataclass(frozen=True, slots=True)
class Heard:
    """What a step's end tells the router: ids of requests."""

    started: tuple[str, ...]  # their first token is here
    finished: tuple[str, ...]


@dataclass(slots=True)
class ReplicaTotals:
    """Sums over the run of one replica."""

    busy_s: float = 0.0
    work_s: float = 0.0  # of these, without what more requests in the same steps would share
    chunk_s: float = 0.0  # of these, in steps with chunks
    waited_s: list[float] = field(default_factory=lambda: [0.0] * len(CAUSES))  # busy time in which others waited
    num_steps: int = 0
    num_rows: int = 0  # decode rows, summed over steps
    most_blocks: int = 0  # KV blocks in use


class SimReplica:
    """Requests in; the time of the next event out."""

    def __init__(
        self, number: int, limits: Limits, costs: Costs, depth: int, max_step_s: float, *, skips: bool = True
    ) -> None:
        self.number = number
        self.totals = ReplicaTotals()
        self._costs = costs
        self._depth = depth
        self._now = 0.0
        self._free_s = 0.0  # when the last launched step ends
        self._steps: deque[SimStep] = deque()
        self._stretch: DecodeStretch | None = None
        self._skips = skips
        self._served: dict[str, Served] = {}
        self._streams = not math.isinf(max_step_s)  # without a target the pace does not ask
        pace = Pace(max_step_s, limits.max_batch_tokens, lambda: self._now)
        self.scheduler = Scheduler(limits, pace=pace)

    @property
    def next_s(self) -> float | None:
        """When something happens next: a step ends after which it is planned anew."""
        if self._stretch is not None:
            return float(self._stretch.ends_s[self._stretch.count])
        return self._steps[0].end_s if self._steps else None

    @property
    def cache_tokens(self) -> int:
        """What its KV memory holds for later prompts."""
        limits = self.scheduler.limits
        return limits.num_blocks * limits.block_size if limits.prefix_cache else 0

    def submit(self, arrival: Arrival, prompt: IntArray, number: int) -> Served:
        """A request arrives. Raises InvalidRequest if it could never run."""
        params = SamplingParams(max_tokens=arrival.num_output, temperature=0, ignore_eos=True)
        limit = arrival.num_prompt + arrival.num_output
        request = Request(str(number), prompt, params, number, (), limit, streams=self._streams)
        self.scheduler.add(request)
        if self._stretch is not None:
            self._skip(self._stretch, self._stretch.num_before(arrival.at_s))
        served = self._served[request.id] = Served(arrival, self.number)
        if not self._steps:  # else the loop is in `collect`
            self._launch(arrival.at_s)
        return served

    def collect(self) -> Heard:
        """The oldest step ends: its tokens become known, and the next is planned."""
        if self._stretch is not None:
            self._skip(self._stretch, self._stretch.count)
        step = self._steps.popleft()
        self._now = step.end_s
        self._count(step)
        for request in step.first:
            served = self._served.get(request.id)
            if served is not None and math.isnan(served.first_s):
                served.first_s, served.num_cached = step.end_s, request.num_cached
        commit = self.scheduler.commit(step.plan, np.full(step.plan.num_results, TOKEN, np.int32))
        for finished in commit.finished:
            self._served.pop(finished.request.id).end_s = step.end_s
        self._launch(step.end_s)
        if self._skips and len(self._steps) == self._depth:
            in_flight = [(step.plan.num_decodes, step.end_s) for step in self._steps]
            self._stretch = find_stretch(self.scheduler, in_flight, self._costs)
        return Heard(
            tuple(request.id for request in step.first), tuple(finished.request.id for finished in commit.finished)
        )

    def _launch(self, now: float) -> None:
        self._now = now
        while len(self._steps) < self._depth and (plan := self.scheduler.schedule()) is not None:
            rows = self.scheduler.rows
            begin_s = max(now, self._free_s)
            shape = shape_of(plan, rows)
            self._free_s = begin_s + self._costs.of(shape)
            work_s = self._costs.work(shape, self._fullness(shape.rows, shape.chunk_tokens))
            owners = (rows.request[chunk.row] for chunk in plan.chunks if chunk.samples)
            first = tuple(owner for owner in owners if owner is not None)
            self._steps.append(SimStep(plan, begin_s, self._free_s, work_s, first, self._why_waiting()))

    def _skip(self, stretch: DecodeStretch, count: int) -> None:
        """So many rounds of the stretch are over. The plans in flight stand for those that follow: they are alike."""
        self._stretch = None
        if count == 0:
            return
        skip(self.scheduler, stretch.rows, count)
        totals, begin_s, ends_s = self.totals, self._steps[0].begin_s, stretch.ends_s.tolist()
        totals.busy_s += ends_s[count - 1] - begin_s
        spare_s = self._costs.seconds[0] * (1.0 - self._fullness(len(stretch.rows), 0))
        totals.work_s += ends_s[count - 1] - begin_s - count * spare_s
        totals.num_steps += count
        totals.num_rows += count * len(stretch.rows)
        totals.most_blocks = max(totals.most_blocks, self.scheduler.pool.num_used)
        times = zip(self._steps, ends_s[count - 1 :], ends_s[count:], strict=False)
        self._steps = deque(
            replace(step, begin_s=begin, end_s=end, work_s=end - begin - spare_s) for step, begin, end in times
        )
        self._now, self._free_s = ends_s[count - 1], self._steps[-1].end_s

    def _fullness(self, num_rows: int, num_chunk_tokens: int) -> float:
        """How much of a step's room is taken; 1 is full."""
        limits = self.scheduler.limits
        return min(num_rows / limits.num_rows + num_chunk_tokens / limits.max_batch_tokens, 1.0)

    def _why_waiting(self) -> int | None:
        """What keeps requests in the queue while this step runs."""
        scheduler = self.scheduler
        if scheduler.num_waiting == 0 or (first := scheduler.first_waiting()) is None:
            return None
        if scheduler.rows.num_free == 0:
            return ROWS
        needed = scheduler.limits.most_blocks(len(first.tokens), 0)
        return MEMORY if needed > scheduler.pool.num_available else COMPUTE

    def _count(self, step: SimStep) -> None:
        totals, seconds = self.totals, step.end_s - step.begin_s
        totals.busy_s += seconds
        totals.work_s += step.work_s
        totals.num_steps += 1
        totals.num_rows += step.plan.num_decodes
        totals.chunk_s += seconds if step.plan.chunks else 0.0
        totals.most_blocks = max(totals.most_blocks, self.scheduler.pool.num_used)
        if step.cause is not None:
            totals.waited_s[step.cause] += seconds
