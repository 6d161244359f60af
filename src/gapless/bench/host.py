"""The host cost of a step: the real loop, scheduler, slots and streams, with the model stubbed out.

Each stream operation runs at once on the loop's own thread, so only host work is timed: schedule, fill, the queueing of
three streams, collect, commit. Either a fixed set of rows decodes, or (`mixed`) requests end and others take their rows
all the time, as in workload X.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from gapless.bench.workload_jobs import END_TOKEN, FIRST_TOKEN, WORKLOADS
from gapless.core.limits import Limits
from gapless.core.outcome import Commit
from gapless.core.params import MAX_LOGPROBS, SamplingParams
from gapless.core.plan import Plan
from gapless.core.request import IntArray, Request, int_array
from gapless.core.scheduler import Scheduler
from gapless.device.base import Buffer
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.errors import ConfigError
from gapless.garbage import heap_frozen
from gapless.pipeline.depth import FixedDepth
from gapless.pipeline.executor import LocalExecutor
from gapless.pipeline.loop import run_loop
from gapless.progress import progress_bar
from gapless.runner.fill import Filled, fill
from gapless.runner.steering import Steering
from gapless.trace.columns import PHASE_MASK, PHASES
from gapless.trace.null_recorder import NullRecorder
from gapless.trace.recorder import Recorder

PROMPT_TOKENS = 16  # of a request of the fixed set
BLOCK_SIZE = 16
MIXED_BATCH_TOKENS = 8192  # most tokens in a mixed step, as on a GPU
WARMUP_STEPS = 20
NUM_ROUNDS = 5

Pack = Callable[[Plan, IntArray], int]


class StubRunner:
    """A model that takes no time: every sample is token 7, and every log-probability 0."""

    def __init__(self, limits: Limits, pack: Pack) -> None:
        self.buffers: Sequence[Buffer] = ()
        self.mask_words = 0
        self._pack = pack
        self._tokens = torch.full((limits.num_rows,), 7, dtype=torch.int32)

    def fill(self, plan: Plan, out: IntArray) -> Filled:
        return Filled(plan, self._pack(plan, out))

    def step(self, filled: Filled, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        count = filled.plan.num_samples
        out[:count] = self._tokens[:count]

    def forward(self, filled: Filled, packed_plan: torch.Tensor) -> None:
        pass

    def sample(self, filled: Filled, packed_plan: torch.Tensor, new: Steering, out: torch.Tensor) -> None:
        self.step(filled, packed_plan, out)


@dataclass(frozen=True, slots=True)
class HostLoad:
    """What the loop is given to do."""

    num_steps: int  # to time
    depth: int = 2
    mixed: bool = False  # requests of workload X, more than rows; else a fixed set that decodes
    logprobs: int | None = None  # likeliest tokens to score with each sample
    packing: str = "cpu"  # "gpu": pack steps with chunks as a captured step reads them

    def warmup_steps(self, batch: int) -> int:
        """Steps until a mixed load is steady: its first prompts take many."""
        workload = WORKLOADS["X"]
        return WARMUP_STEPS + (-(-batch * workload.prompt_tokens // MIXED_BATCH_TOKENS) if self.mixed else 0)

    def limits(self, batch: int) -> Limits:
        """As many blocks as the rows can fill; of a mixed load, so few that the prefix cache soon fills the rest."""
        if not self.mixed:
            length = PROMPT_TOKENS + WARMUP_STEPS + self.num_steps
            return Limits(batch, batch * (length // BLOCK_SIZE + 2), BLOCK_SIZE, batch * PROMPT_TOKENS, length)
        length, usual = WORKLOADS["X"].length, WORKLOADS["X"].length // 2  # most tokens of a request; about the mean
        num_blocks = (length + batch * usual * 4 // 3) // BLOCK_SIZE
        return Limits(batch, num_blocks, BLOCK_SIZE, MIXED_BATCH_TOKENS, length)

    def requests(self, batch: int) -> list[Request]:
        """All that the run needs, in the order of arrival."""
        if self.mixed:
            return self._mixed_requests(batch)
        num_new = WARMUP_STEPS + self.num_steps
        return [self._request(n, int_array([n % 1000] * PROMPT_TOKENS), num_new) for n in range(batch)]

    def _mixed_requests(self, batch: int) -> list[Request]:
        """The first of each row is somewhere in the middle of its answer, so that ends are spread from the start."""
        draw, workload = np.random.default_rng(0), WORKLOADS["X"]
        num_steps = self.warmup_steps(batch) + self.num_steps + self.depth
        count = batch * (2 + num_steps // workload.least_answer)
        lengths = draw.integers(workload.least_prompt, workload.prompt_tokens + 1, count).tolist()
        num_new = draw.integers(workload.least_answer, workload.max_tokens + 1, count)
        num_new[:batch] = draw.integers(1, num_new[:batch] + 1)
        prompts = (int_array(draw.integers(FIRST_TOKEN, END_TOKEN, length)) for length in lengths)
        return [self._request(n, *drawn) for n, drawn in enumerate(zip(prompts, num_new.tolist(), strict=True))]

    def _request(self, number: int, prompt: IntArray, num_new: int) -> Request:
        params = SamplingParams(max_tokens=num_new, temperature=0, ignore_eos=True, logprobs=self.logprobs)
        return Request(str(number), prompt, params, seed=number, stop_ids=(2,), limit=len(prompt) + num_new)

    def pack(self, batch: int) -> Pack:
        """How steps are packed for the device."""
        if self.packing == "cpu":
            return fill
        from gapless.runner.mixed import pack_mixed  # needs Triton

        return lambda plan, out: pack_mixed(plan, out, batch) if plan.chunks else fill(plan, out)


@dataclass(frozen=True, slots=True)
class HostRow:
    """One batch size. Times are of steps with all rows running."""

    batch: int
    host_ms_per_step: float  # median of the rounds
    host_ms_min: float
    host_ms_max: float
    host_us_per_row: float
    recorder_us: float  # what the recorder adds to a step, included above
    num_steps: int
    num_admitted: float  # requests that get a row, a step
    phase_shares: dict[str, float]  # of the fastest round's time, by host phase


@dataclass(frozen=True, slots=True)
class _Round:
    """Figures of the timed steps of one run."""

    ms_per_step: float
    num_admitted: float
    phase_shares: dict[str, float]


def measure(batch: int, load: HostLoad) -> HostRow:
    """Time the steps of a load with `batch` rows."""
    recorded: list[_Round] = []
    unrecorded: list[_Round] = []
    for _ in range(NUM_ROUNDS):  # in turn, so that drift affects both alike
        recorded.append(_run(batch, load, Recorder(kept_steps=None)))
        unrecorded.append(_run(batch, load, NullRecorder()))
    times = [found.ms_per_step for found in recorded]
    middle, without = statistics.median(times), statistics.median(found.ms_per_step for found in unrecorded)
    best = min(recorded, key=lambda found: found.ms_per_step)
    per_row, recorder_us = middle * 1e3 / batch, (middle - without) * 1e3
    figures = (middle, best.ms_per_step, max(times), per_row, recorder_us, load.num_steps)
    return HostRow(batch, *figures, best.num_admitted, best.phase_shares)


def _run(batch: int, load: HostLoad, recorder: Recorder) -> _Round:
    """Run the loop until enough steps were settled."""
    limits = load.limits(batch)
    scheduler = Scheduler(limits)
    for request in load.requests(batch):
        scheduler.add(request)
    runner = StubRunner(limits, load.pack(batch))
    executor = LocalExecutor(CpuDevice(driver=InlineDriver()), runner, limits, load.depth, recorder)
    stamps: list[tuple[float, int]] = []  # of each settled step: when, and how many requests still waited
    first = load.warmup_steps(batch) - 1
    last = first + load.num_steps - 1

    def deliver(commit: Commit) -> None:
        stamps.append((time.perf_counter(), scheduler.num_waiting))

    def admit(idle: bool) -> bool:
        if len(stamps) > last:
            scheduler.abort_all()
        return not idle

    gc.collect()
    with heap_frozen():
        run_loop(scheduler, executor, FixedDepth(load.depth), admit, deliver, recorder)
    executor.close()
    recorder.close()
    (begin, waiting), (end, still_waiting) = stamps[first], stamps[last]
    num_steps = last - first
    shares = _phase_shares(recorder, begin, end)
    return _Round((end - begin) / num_steps * 1e3, (waiting - still_waiting) / num_steps, shares)


def _phase_shares(recorder: Recorder, begin: float, end: float) -> dict[str, float]:
    """What part of this time each host phase took."""
    timeline = recorder.timeline()
    spent = np.clip(timeline.phase_ends, begin, end) - np.clip(timeline.marks.time, begin, end)
    total = np.bincount(timeline.marks.code & PHASE_MASK, spent, len(PHASES)) / (end - begin)
    return {name: share for name, share in zip(PHASES, total.tolist(), strict=True) if share > 0}


def main(args: argparse.Namespace) -> int:
    """Measure each batch size, print a table, and write it as JSON if requested."""
    if min(args.batch) < 1 or args.steps < 2 or args.depth < 1:
        raise ConfigError("batch sizes and depth must be at least 1, steps at least 2")
    if args.json is not None:
        _check_path(Path(args.json))
    if args.logprobs is not None and not 0 <= args.logprobs <= MAX_LOGPROBS:
        raise ConfigError(f"--logprobs must be from 0 to {MAX_LOGPROBS}")
    load = HostLoad(args.steps, args.depth, args.mixed, args.logprobs, args.packing)
    torch.set_num_threads(1)
    rows = []
    with progress_bar("measuring", len(args.batch), "batch") as bar:
        for batch in args.batch:
            rows.append(measure(batch, load))
            bar.advance(1)
    _print(rows, load)
    if args.json is not None:
        facts = {**asdict(load), "python": sys.version.split()[0]}
        _write(Path(args.json), {**facts, "rows": [asdict(row) for row in rows]})
    return 0


def _print(rows: Sequence[HostRow], load: HostLoad) -> None:
    kind = "mixed" if load.mixed else "decode"
    scored = "" if load.logprobs is None else f", {load.logprobs} log-probabilities a sample"
    print(
        f"host cost of a {kind} step{scored}, model stubbed, depth {load.depth}, "
        f"median of {NUM_ROUNDS} rounds of {load.num_steps} steps"
    )
    print(
        f"{'batch':>6} {'ms/step':>9} {'min':>8} {'max':>8} {'µs/row':>8} {'recorder µs':>12} {'admitted':>9}  phases"
    )
    for row in rows:
        shares = sorted(row.phase_shares.items(), key=lambda item: -item[1])
        phases = ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005)
        print(
            f"{row.batch:>6} {row.host_ms_per_step:>9.4f} {row.host_ms_min:>8.4f} {row.host_ms_max:>8.4f} "
            f"{row.host_us_per_row:>8.3f} {row.recorder_us:>12.1f} {row.num_admitted:>9.2f}  {phases}"
        )


def _check_path(path: Path) -> None:
    """Raise ConfigError before anything is measured, if the result could not be written."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: cannot be written: no such folder")
    if path.is_dir():
        raise ConfigError(f"{path}: cannot be written: it is a folder")


def _write(path: Path, value: object) -> None:
    try:
        path.write_text(json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
