"""Measures the steps of a real engine: the shape of each, and its time as the loop sees it.

The time of a step runs from its plan, or from the end of the step before it, to its commit. That is what a client sees
between two tokens, host work included where it is not hidden.
"""

from __future__ import annotations

import math
import random
import time

from gapless.bench.replay import replay
from gapless.core.pace import Pace
from gapless.core.params import SamplingParams
from gapless.core.plan import Plan
from gapless.core.scheduler import Scheduler
from gapless.garbage import heap_frozen
from gapless.llm import LLM
from gapless.progress import progress_bar
from gapless.sim.arrivals import Arrival
from gapless.sim.costs import MeasuredStep, StepFile, StepShape, shape_of

WARM_UP = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


class StepMeter(Pace):
    """A pace that keeps the shape and the time of each step."""

    def __init__(self, scheduler: Scheduler) -> None:
        limits, pace = scheduler.limits, scheduler.pace
        super().__init__(pace.target_s, limits.max_batch_tokens)
        self.steps: list[MeasuredStep] = []
        self._rows = scheduler.rows
        self._shapes: dict[int, tuple[StepShape, float]] = {}
        self._ended_s = -math.inf

    def begin(self, plan: Plan) -> None:
        super().begin(plan)
        self._shapes[plan.step] = (shape_of(plan, self._rows), time.perf_counter())

    def end(self, plan: Plan) -> None:
        super().end(plan)
        now = time.perf_counter()
        shape, planned_s = self._shapes.pop(plan.step)
        seconds = now - max(planned_s, self._ended_s)
        self._ended_s = now
        if seconds > 0:
            self.steps.append(MeasuredStep(shape, seconds))


def measure_steps(llm: LLM, rounds: int, longest: int | None = None) -> StepFile:
    """Run batches of growing size at several lengths, some of which arrive while others decode."""
    engine = llm.engine
    limits = engine.resolved.limits
    longest = min(longest or limits.max_model_len // 8, limits.max_model_len - 64)
    llm.generate([[1]], WARM_UP)
    meter = StepMeter(engine._scheduler)
    engine._scheduler.pace = meter
    jobs = [batch for number in range(rounds) for batch in batches(limits.num_rows, longest, number)]
    with progress_bar("measuring", len(jobs), "batch") as bar, heap_frozen():
        for number, batch in enumerate(jobs):
            replay(engine, batch, number + 1)
            bar.advance(1)
    depth = int(engine.options.depth)
    name = f"{engine.options.model} on {engine.resolved.device_name}"
    return StepFile(limits, depth, name, tuple(meter.steps))


def batches(num_rows: int, longest: int, seed: int) -> list[list[Arrival]]:
    """Requests of one batch each: sizes double up to the rows, lengths are drawn up to the longest."""
    draw = random.Random(seed)
    sizes = [min(2**power, num_rows) for power in range(num_rows.bit_length() + 1)]
    found = []
    for size in dict.fromkeys(sizes):
        lengths = [max(int(longest * draw.random() ** 2), 1) for _ in range(size + size // 2)]
        found.append([Arrival(0.0, length, draw.randint(4, 24)) for length in lengths])
    draw.shuffle(found)
    return found
