"""The GPU workloads timed end to end, with random weights: by Gapless at several depths, then by peers.

Each runs twice: the first time in its process, when some kernels may still have to be compiled, and again.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapless.bench.kernels import KernelTable, profile_decode
from gapless.bench.workload_jobs import SHAPES, WORKLOADS, Workload
from gapless.bench.workload_peers import PeerPlace, device_memory, measure_peer
from gapless.bench.workload_rows import (
    HEADER,
    Rates,
    WorkloadRow,
    chart_groups,
    format_row,
    measure_rates,
    timed_row,
    write_rows,
)
from gapless.errors import ConfigError
from gapless.progress import progress_bar

if TYPE_CHECKING:
    from gapless.trace.files import TraceFiles
    from gapless.trace.timeline import Timeline


@dataclass(frozen=True, slots=True)
class WorkloadTask:
    """What to measure."""

    names: tuple[str, ...]
    depths: tuple[int | str, ...]
    batch_invariant: bool = False
    peers: tuple[PeerPlace, ...] = ()
    kernels: bool = False  # profile steps after each workload
    trace: str | None = None  # file for timelines
    json: str | None = None
    plot: str | None = None
    logs: str | None = None  # folder for the output of peers

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in WORKLOADS:
                raise ConfigError(f"--workload: unknown {name!r}; known: {', '.join(WORKLOADS)}")


def measure(
    task: WorkloadTask, rates: Rates, folder: Path, timelines: list[Timeline] | None = None
) -> Iterator[WorkloadRow | str]:
    """Run the workloads at each depth, one engine for all that share a shape; add each run's timeline to a list.

    Then each peer does the same. A text says what could not be run.
    """
    for shape in dict.fromkeys(WORKLOADS[name].shape for name in task.names):
        path = write_model(folder, shape)
        names = [name for name in task.names if WORKLOADS[name].shape == shape]
        ours: dict[str, float] = {}  # seconds
        for depth in task.depths:
            for row in _measure_shape(path, names, depth, task, rates, timelines):
                ours[row.workload] = row.first_s + row.seconds
                yield row
        if task.peers:
            _free_device()
            held = device_memory()  # now: the memory of a peer that ended returns late
        for place in task.peers:
            log = Path(task.logs or folder) / f"{shape}-{place.name}.log"
            yield from measure_peer(place, path, ours, rates, log, held)


def write_model(folder: Path, shape: str) -> Path:
    """A folder with the config.json of a shape."""
    path = folder / shape
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[shape]))
    return path


def _free_device() -> None:
    """Return the memory of our engines to the device."""
    from gapless.device.cuda import release_memory

    gc.collect()
    release_memory()


def _measure_shape(
    path: Path,
    names: Sequence[str],
    depth: int | str,
    task: WorkloadTask,
    rates: Rates,
    timelines: list[Timeline] | None,
) -> Iterator[WorkloadRow]:
    from gapless import LLM

    works = [WORKLOADS[name] for name in names]
    began = time.perf_counter()
    llm = LLM(
        path,
        load_format="dummy",
        device="cuda",
        dtype="bfloat16",
        depth=depth,
        max_num_rows=max(work.max_num_rows for work in works),
        max_model_len=max(work.length for work in works),
        prefix_cache=False,
        batch_invariant=task.batch_invariant,
        trace=timelines is not None,
    )
    start_s = time.perf_counter() - began
    with llm:
        for name in names:
            row = _time(llm, name, depth, rates, start_s, timelines)
            row = replace(row, engine="Gapless, batch-invariant") if task.batch_invariant else row
            yield replace(row, kernels=_take_apart(llm, WORKLOADS[name])) if task.kernels else row


def _take_apart(llm: Any, work: Workload) -> KernelTable | str:
    """The kernels of a step, or why there are none to show. The times measured before remain valid."""
    if not work.is_steady:
        return "not profiled, because few steps are alike"
    try:
        return profile_decode(llm, work.halfway())
    except ValueError as error:
        return str(error)


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of a workload by Gapless."""

    seconds: float
    num_steps: int
    busy_s: float
    host_s: float
    idle_by_cause: dict[str, float]
    ledger: dict[str, int]


def _time(
    llm: Any, name: str, depth: int | str, rates: Rates, start_s: float, timelines: list[Timeline] | None
) -> WorkloadRow:
    monitor, work = llm.engine.monitor, WORKLOADS[name]
    first = _run(llm, name, work)
    before = llm.stats()
    again = _run(llm, name, work)
    if timelines is not None:
        timelines.append(monitor.timeline(f"{name}, depth {depth}", before).trimmed())
    peak_gib = monitor.device_memory() / 2**30
    row = timed_row(name, "Gapless", first.seconds, again.seconds, rates, start_s=start_s, peak_gib=peak_gib)
    return replace(
        row,
        depth=depth,
        last_depth=monitor.depth,
        num_steps=again.num_steps,
        idle_share=1 - again.busy_s / again.seconds,
        host_ms_per_step=again.host_s / again.num_steps * 1e3,
        idle_by_cause=again.idle_by_cause,
        first_ledger=first.ledger,
        ledger=again.ledger,
        graphs=monitor.capture_cost(),
        attention=monitor.attention(),
    )


def _run(llm: Any, name: str, work: Workload) -> _Run:
    from gapless import SamplingParams
    from gapless.bench.torch_engines import loop_cpu_s

    monitor, prompts = llm.engine.monitor, work.prompts()
    params = [
        SamplingParams(max_tokens=count, ignore_eos=True, seed=number, **work.sampling())
        for number, count in enumerate(work.counts())
    ]
    idle, ledger, host_s, before = monitor.idle_by_cause(), monitor.ledger(), loop_cpu_s(), llm.stats()  # clock last
    found = llm.generate(prompts, params)
    spent, host_s = llm.stats() - before, loop_cpu_s() - host_s
    wrong = [item for item, wanted in zip(found, params, strict=True) if len(item.token_ids) != wanted.max_tokens]
    if wrong:
        raise RuntimeError(f"workload {name}: {len(wrong)} requests did not finish: {wrong[0].error}")
    return _Run(
        seconds=spent.time_s,
        num_steps=spent.num_steps,
        busy_s=spent.busy_s,
        host_s=host_s,
        idle_by_cause={cause: s - idle[cause] for cause, s in monitor.idle_by_cause().items() if s > idle[cause]},
        ledger={why: n - ledger.get(why, 0) for why, n in monitor.ledger().items() if n > ledger.get(why, 0)},
    )


def main(task: WorkloadTask) -> int:
    """Measure and print a table; write rows, plot and timelines if requested, also when a later run fails."""
    from gapless.device import pick_device
    from gapless.trace.files import TraceFiles

    try:
        pick_device("cuda")
    except ConfigError:
        raise ConfigError("--workload needs an NVIDIA GPU; torch finds none here") from None
    files = TraceFiles.at(task.trace) if task.trace is not None else None
    timelines: list[Timeline] | None = [] if files is not None else None
    rows: list[WorkloadRow] = []
    runs = len(task.names) * (len(task.depths) + len(task.peers))
    rates = measure_rates()
    print(f"reads {rates.bytes_per_s / 1e12:.2f} TB/s, large products {rates.operations_per_s / 1e12:.0f} TFLOPS")
    print(HEADER)
    try:
        with tempfile.TemporaryDirectory() as folder, progress_bar("measuring", runs, "run") as bar:
            for row in measure(task, rates, Path(folder), timelines):
                if isinstance(row, WorkloadRow):
                    rows.append(row)
                    write_rows(rows, rates, task.json)  # at once: a run takes minutes
                bar.write(format_row(row) if isinstance(row, WorkloadRow) else row, sys.stdout)
                bar.advance(1)
    finally:
        _finish(rows, files, timelines, task.plot)
    return 0


def _finish(
    rows: Sequence[WorkloadRow], files: TraceFiles | None, timelines: list[Timeline] | None, plot_path: str | None
) -> None:
    """Print and draw the results of all rows together."""
    from gapless.bench.chart import bar_chart

    print(*dict.fromkeys(text for row in rows for text in (row.graphs, row.attention) if text), sep="\n")
    for row in rows:
        if row.kernels is not None:
            print(f"\nkernels of {row.workload}, {row.label}: {row.kernels}")
    if files is not None and timelines:
        files.write(timelines)
        print(f"timeline: {files}")
    if plot_path is not None and rows:
        subtitle = "each group to its own scale; red: the least time, by measured rates of reads and of products"
        Path(plot_path).write_text(bar_chart(chart_groups(rows), "GPU workloads", subtitle))
