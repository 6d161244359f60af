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
from gapless.pipeline.engine import Engine
from gapless.progress import progress_bar
from gapless.sim.arrivals import Arrival
from gapless.sim.costs import MeasuredStep, StepShape, shape_of
from gapless.sim.step_file import StepFile

MOST_OUTPUT = 24  # tokens of a measured request
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

    @classmethod
    def of(cls, engine: Engine) -> StepMeter:
        """Measures all steps of the engine from now on. Only while it has no requests."""
        meter = cls(engine._scheduler)
        engine._scheduler.pace = meter
        return meter

    def start_over(self) -> None:
        """Forget what steps of other requests said about the pace. Only while no request runs."""
        self.num_tokens = Pace(self.target_s, self._max_tokens).num_tokens

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


def warm_up(llm: LLM) -> None:
    """What only a first step pays is not measured."""
    llm.generate([[1]], WARM_UP)


def measure_steps(llm: LLM, rounds: int, longest: int | None = None) -> StepFile:
    """Warm up, calibrate, and return what was measured with the engine's own limits."""
    engine = llm.engine
    warm_up(llm)
    meter = StepMeter.of(engine)
    calibrate(engine, rounds, longest or engine.resolved.limits.max_model_len // 8)
    name = f"{engine.options.model} on {engine.resolved.device_name}"
    return StepFile(engine.resolved.limits, int(engine.options.depth), name, tuple(meter.steps))


def calibrate(engine: Engine, rounds: int, longest: int, seed: int = 0) -> None:
    """Run batches of growing size at several lengths, some of which are fed while others decode."""
    limits = engine.resolved.limits
    longest = max(min(longest, limits.max_model_len - MOST_OUTPUT), 1)
    numbers = range(seed * rounds, (seed + 1) * rounds)
    jobs = [batch for number in numbers for batch in batches(limits.num_rows, longest, number)]
    with progress_bar("measuring", len(jobs), "batch") as bar, heap_frozen():
        for number, batch in enumerate(jobs):
            replay(engine, batch, 1 + 100 * seed + number)
            bar.advance(1)


def batches(num_rows: int, longest: int, seed: int) -> list[list[Arrival]]:
    """Requests of one batch each: sizes double up to the rows, lengths are drawn up to the longest."""
    draw = random.Random(seed)
    sizes = [min(2**power, num_rows) for power in range(num_rows.bit_length() + 1)]
    found = []
    for size in dict.fromkeys(sizes):
        lengths = [max(int(longest * draw.random() ** 2), 1) for _ in range(size + size // 2)]
        found.append([Arrival(0.0, length, draw.randint(4, MOST_OUTPUT)) for length in lengths])
    draw.shuffle(found)
    return found
