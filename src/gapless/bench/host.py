"""The host cost of a step: the real loop, scheduler, slots and streams, with the model stubbed out.

Each stream operation runs at once on the loop's own thread, so only host work is timed: schedule, fill, the queueing of
three streams, collect, commit.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gapless.core.limits import Limits
from gapless.core.outcome import Commit
from gapless.core.params import SamplingParams
from gapless.core.plan import Plan
from gapless.core.request import IntArray, Request, int_array
from gapless.core.scheduler import Scheduler
from gapless.device.base import Buffer
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.errors import ConfigError
from gapless.pipeline.depth import FixedDepth
from gapless.pipeline.executor import LocalExecutor
from gapless.pipeline.loop import run_loop
from gapless.progress import progress_bar
from gapless.runner.fill import Filled, fill
from gapless.trace.null_recorder import NullRecorder
from gapless.trace.recorder import Recorder

PROMPT_TOKENS = 16
WARMUP_STEPS = 20
NUM_ROUNDS = 5


class StubRunner:
    """A model that takes no time: every sample is token 7."""

    def __init__(self, limits: Limits) -> None:
        self.buffers: Sequence[Buffer] = ()
        self._tokens = torch.full((limits.num_rows,), 7, dtype=torch.int32)

    def fill(self, plan: Plan, out: IntArray) -> Filled:
        return Filled(plan, fill(plan, out))

    def step(self, filled: Filled, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        count = filled.plan.num_samples
        out[:count] = self._tokens[:count]


@dataclass(frozen=True, slots=True)
class HostRow:
    """One batch size. Times are of decode steps with all rows running."""

    batch: int
    host_ms_per_step: float  # median of the rounds
    host_ms_min: float
    host_ms_max: float
    host_us_per_row: float
    recorder_us: float  # what the recorder adds to a step, included above
    num_steps: int


def measure(batch: int, num_steps: int, depth: int) -> HostRow:
    """Time decode steps of a fixed set of `batch` rows."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(NUM_ROUNDS):
        for recorded, found in times.items():  # in turn, so that drift affects both alike
            stamps = _run(batch, WARMUP_STEPS + num_steps, depth, recorded)[-num_steps - 1 : -1]
            found.append((stamps[-1] - stamps[0]) / (len(stamps) - 1) * 1e3)
    middle, without = (statistics.median(times[recorded]) for recorded in (True, False))
    low, high = min(times[True]), max(times[True])
    return HostRow(batch, middle, low, high, middle * 1e3 / batch, (middle - without) * 1e3, num_steps)


def _run(batch: int, num_steps: int, depth: int, recorded: bool) -> list[float]:
    """The times at which steps were settled."""
    length = PROMPT_TOKENS + num_steps
    limits = Limits(
        num_rows=batch,
        num_blocks=batch * (length // 16 + 2),
        block_size=16,
        max_batch_tokens=batch * PROMPT_TOKENS,
        max_model_len=length,
    )
    scheduler = Scheduler(limits)
    params = SamplingParams(max_tokens=num_steps, temperature=0, ignore_eos=True)
    for number in range(batch):
        prompt = int_array([number % 1000] * PROMPT_TOKENS)
        scheduler.add(Request(str(number), prompt, params, seed=number, stop_ids=(2,), limit=length))
    recorder = Recorder() if recorded else NullRecorder()
    executor = LocalExecutor(CpuDevice(driver=InlineDriver()), StubRunner(limits), limits, depth, recorder)
    stamps: list[float] = []

    def deliver(commit: Commit) -> None:
        stamps.append(time.perf_counter())

    gc.collect()
    run_loop(scheduler, executor, FixedDepth(depth), lambda idle: not idle, deliver, recorder)
    executor.close()
    recorder.close()
    return stamps


def main(batches: Sequence[int], num_steps: int, depth: int, json_path: str | None) -> int:
    """Measure each batch size, print a table, and write it as JSON if requested."""
    if min(batches) < 1 or num_steps < 2 or depth < 1:
        raise ConfigError("batch sizes and depth must be at least 1, steps at least 2")
    if json_path is not None:
        _check_path(Path(json_path))
    torch.set_num_threads(1)
    rows = []
    with progress_bar("measuring", len(batches), "batch") as bar:
        for batch in batches:
            rows.append(measure(batch, num_steps, depth))
            bar.advance(1)
    print(
        f"host cost of a decode step, model stubbed, depth {depth}, median of {NUM_ROUNDS} rounds of {num_steps} steps"
    )
    print(f"{'batch':>6} {'ms/step':>9} {'min':>8} {'max':>8} {'µs/row':>8} {'recorder µs':>12}")
    for row in rows:
        print(
            f"{row.batch:>6} {row.host_ms_per_step:>9.4f} {row.host_ms_min:>8.4f} {row.host_ms_max:>8.4f} "
            f"{row.host_us_per_row:>8.3f} {row.recorder_us:>12.1f}"
        )
    if json_path is not None:
        _write(
            Path(json_path), {"depth": depth, "python": sys.version.split()[0], "rows": [asdict(row) for row in rows]}
        )
    return 0


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
