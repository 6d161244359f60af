"""Puts an engine together: the built model, the scheduler, the depth, the recorder and the executor.

Knows who needs whom. The engine runs what is made here, and the monitor reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from gapless.config import EngineOptions
from gapless.core.pace import Pace
from gapless.core.request import Request
from gapless.core.scheduler import Scheduler
from gapless.guides.compiler import Compiler
from gapless.guides.loading import load_vocabulary
from gapless.models.rank_group import RankGroup
from gapless.models.source import ModelSource
from gapless.pipeline.checked import CheckedExecutor
from gapless.pipeline.depth import AUTO_DEPTHS, AutoDepth, FixedDepth
from gapless.pipeline.executor import Executor, LocalExecutor
from gapless.pipeline.loop import Depth
from gapless.pipeline.ranked import LoneRank, OtherRanks, other_ranks
from gapless.ranks.team import Alarm
from gapless.runner.build import Built, build
from gapless.trace.null_recorder import NullRecorder
from gapless.trace.recorder import KEPT_STEPS, Recorder


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts of one engine."""

    built: Built
    scheduler: Scheduler
    depth: Depth
    recorder: Recorder
    executor: Executor
    compiler: Compiler


def put_together(
    options: EngineOptions,
    source: ModelSource,
    announce: Callable[[Request], None],
    alarm: Alarm,
    progress: Callable[[int, int], None] | None = None,
    traced_steps: int | None = None,
    *,
    processed: bool = False,
) -> Assembly:
    """Load the model and make everything that runs it. `announce` is told of each request that gets a row.

    alarm: told when another rank of the model is lost.
    """
    num_slots = max(AUTO_DEPTHS) if options.depth == "auto" else int(options.depth)
    ranks = other_ranks(options, source, num_slots, alarm, processed=processed)
    try:
        return _put_together(options, source, announce, ranks, progress, traced_steps, num_slots, processed=processed)
    except BaseException:
        ranks.abandon()
        raise


def _put_together(
    options: EngineOptions,
    source: ModelSource,
    announce: Callable[[Request], None],
    ranks: LoneRank | OtherRanks,
    progress: Callable[[int, int], None] | None,
    traced_steps: int | None,
    num_slots: int,
    *,
    processed: bool,
) -> Assembly:
    def make(group: RankGroup) -> Built:
        return _in_a_thread(partial(build, options, source, progress, processed=processed, group=group))

    built = ranks.build(make)
    limits = built.resolved.limits
    pace = Pace(options.max_step_time or math.inf, limits.max_batch_tokens)
    scheduler = Scheduler(limits, announce, pace, built.chunk_cost)
    recorder = _make_recorder(options, built, scheduler, traced_steps)
    depth: Depth = AutoDepth() if options.depth == "auto" else FixedDepth(int(options.depth))
    executor = ranks.executor(_make_executor(options, built, scheduler, recorder, num_slots), limits)
    built.device.late.ready()
    model = built.resolved.model
    compiler = Compiler(partial(load_vocabulary, source, model.vocab_size, model.eos_token_ids))
    return Assembly(built, scheduler, depth, recorder, executor, compiler)


def _make_recorder(options: EngineOptions, built: Built, scheduler: Scheduler, traced_steps: int | None) -> Recorder:
    if not options.record:
        return NullRecorder()
    kept_steps = traced_steps if options.trace else KEPT_STEPS
    return Recorder(kept_steps=kept_steps, counts=scheduler.counters, missed=built.runner.ledger)


def _make_executor(
    options: EngineOptions, built: Built, scheduler: Scheduler, recorder: Recorder, num_slots: int
) -> Executor:
    make = partial(LocalExecutor, recorder=recorder)
    device, runner, limits = built.device, built.runner, built.resolved.limits
    if options.check:
        return CheckedExecutor(device, runner, limits, num_slots, scheduler, built.kv, make)
    return make(device, runner, limits, num_slots)


def _in_a_thread(fn: Callable[[], Built]) -> Built:
    """Run `fn` on a thread that ends with it.

    A thread that multiplies on a CPU keeps a team of helper threads for life. Once there are more of them than cores,
    all teams, the compute stream's too, stop waiting actively, and steps take up to twice as long.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(fn).result()
