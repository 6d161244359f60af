"""The GPU workloads timed end to end, with random weights.

Each time comes with a limit: the bytes that a step must read (weights once, the KV cache of every live token) divided
by the read rate measured in the same run.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapless.bench.chart import ChartBar, Group
from gapless.bench.kernels import KernelTable, profile_decode
from gapless.bench.workload_jobs import SHAPES, WORKLOADS, Workload, run_bytes
from gapless.bench.workload_peers import PEER, PeerTask, is_installed, time_generate_batch
from gapless.errors import ConfigError
from gapless.progress import progress_bar

if TYPE_CHECKING:
    from gapless.trace.files import TraceFiles
    from gapless.trace.timeline import Timeline

PATIENCE, PATIENCE_S = 30, 120  # limit of a peer: this many times our time, and at least this many seconds


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """One workload at one depth."""

    workload: str
    engine: str
    seconds: float
    ms_per_step: float
    tokens_per_s: float
    limit_ms: float  # mean over the run
    limit_share: float
    start_s: float
    peak_gib: float
    depth: int | None = None  # the following is known only for Gapless
    idle_share: float | None = None  # of the compute stream, in the run
    host_ms_per_step: float | None = None  # processor time of the loop
    idle_by_cause: dict[str, float] = field(default_factory=dict)  # seconds of the compute stream
    graphs: str = ""  # what capturing took
    attention: str = ""  # which one ran, and why
    kernels: KernelTable | str | None = None  # of a decode step halfway through, or why they are not known


def measure(
    names: Sequence[str],
    depths: Sequence[int],
    folder: Path,
    timelines: list[Timeline] | None = None,
    *,
    peers: bool = False,
    kernels: bool = False,
) -> Iterator[WorkloadRow | str]:
    """Run the workloads at each depth, one engine for all that share a shape; add each run's timeline to a list.

    With `peers`, transformers does the same jobs. With `kernels`, steps are profiled after each run. A text says what
    could not be run.
    """
    from gapless.device.cuda import CudaDevice

    rate = CudaDevice().read_rate()
    for shape in dict.fromkeys(WORKLOADS[name].shape for name in names):
        path = folder / shape
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(SHAPES[shape]))
        chosen = [name for name in names if WORKLOADS[name].shape == shape]
        ours: dict[str, float] = {}  # seconds
        for depth in depths:
            for row in _measure_shape(path, chosen, depth, rate, timelines, kernels=kernels):
                ours[row.workload] = row.seconds
                yield row
        if peers:
            yield from _measure_peer(path, ours, rate)


def _measure_peer(path: Path, ours: dict[str, float], rate: float) -> Iterator[WorkloadRow | str]:
    """Only jobs of one length: a peer takes one number of new tokens for all. Its time limit is a multiple of ours."""
    chosen = [name for name in ours if not WORKLOADS[name].mixed]
    tasks = [
        PeerTask(work.prompts(seed=1), work.prompts(), work.max_tokens, max(PATIENCE_S, PATIENCE * ours[name]))
        for name, work in ((name, WORKLOADS[name]) for name in chosen)
    ]
    for name, task, timed in zip(chosen, tasks, time_generate_batch(path, tasks), strict=True):
        if isinstance(timed, Exception):
            yield f"{PEER}, {name}: failed: {type(timed).__name__}: {timed}"
            continue
        count = task.max_tokens
        limit_s = run_bytes(WORKLOADS[name], task.prompts, count) / rate
        yield WorkloadRow(
            workload=name,
            engine=PEER,
            seconds=timed.seconds,
            ms_per_step=timed.seconds / count * 1e3,
            tokens_per_s=timed.num_tokens / timed.seconds,
            limit_ms=limit_s / count * 1e3,
            limit_share=limit_s / timed.seconds,
            start_s=timed.start_s,
            peak_gib=timed.peak_gib,
            attention=f"attention of {PEER}: {timed.attention}",
        )


def _measure_shape(
    path: Path, names: Sequence[str], depth: int, rate: float, timelines: list[Timeline] | None, *, kernels: bool
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
        trace=timelines is not None,
    )
    start_s = time.perf_counter() - began
    with llm:
        for name in names:
            row = _time(llm, name, depth, rate, start_s, timelines)
            yield replace(row, kernels=_take_apart(llm, WORKLOADS[name])) if kernels else row


def _take_apart(llm: Any, work: Workload) -> KernelTable | str:
    """The kernels of a step, or why there are none to show. The times measured before remain valid."""
    if work.mixed:
        return "not profiled, for hardly two steps are alike"
    try:
        return profile_decode(llm, work.halfway())
    except ValueError as error:
        return str(error)


def _time(
    llm: Any, name: str, depth: int, rate: float, start_s: float, timelines: list[Timeline] | None
) -> WorkloadRow:
    from gapless import SamplingParams
    from gapless.bench.torch_engines import loop_cpu_s

    work, prompts, monitor = WORKLOADS[name], WORKLOADS[name].prompts(), llm.engine.monitor
    params = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in work.counts()]
    llm.generate(work.prompts(seed=1), params if work.mixed else replace(params[0], max_tokens=16))  # warm up
    idle, host_s, before = monitor.idle_by_cause(), loop_cpu_s(), llm.stats()  # the clock is read last
    found = llm.generate(prompts, params)
    spent, host_s = llm.stats() - before, loop_cpu_s() - host_s
    if timelines is not None:
        timelines.append(monitor.timeline(f"{name}, depth {depth}", before).trimmed())
    wrong = [item for item, wanted in zip(found, params, strict=True) if len(item.token_ids) != wanted.max_tokens]
    if wrong:
        raise RuntimeError(f"workload {name}: {len(wrong)} requests did not finish: {wrong[0].error}")
    num_steps = spent.num_steps if work.mixed else work.max_tokens
    limit_s = run_bytes(work, prompts, num_steps) / rate
    return WorkloadRow(
        workload=name,
        engine="Gapless",
        depth=depth,
        seconds=spent.time_s,
        ms_per_step=spent.time_s / num_steps * 1e3,
        tokens_per_s=spent.num_generated / spent.time_s,
        limit_ms=limit_s / num_steps * 1e3,
        limit_share=limit_s / spent.time_s,
        idle_share=1 - spent.busy_s / spent.time_s,
        host_ms_per_step=host_s / spent.num_steps * 1e3,
        start_s=start_s,
        peak_gib=monitor.device_memory() / 2**30,
        idle_by_cause={cause: s - idle[cause] for cause, s in monitor.idle_by_cause().items() if s > idle[cause]},
        graphs=monitor.capture_cost(),
        attention=monitor.attention(),
    )


def main(
    names: Sequence[str],
    depths: Sequence[int],
    *,
    json_path: str | None = None,
    plot_path: str | None = None,
    trace: str | None = None,
    peers: bool = False,
    kernels: bool = False,
) -> int:
    """Measure and print a table; write rows, plot and timelines if requested, also when a later run fails."""
    from gapless.device import pick_device
    from gapless.trace.files import TraceFiles

    for name in names:
        if name not in WORKLOADS:
            raise ConfigError(f"--workload: unknown {name!r}; known: {', '.join(WORKLOADS)}")
    pick_device("cuda")
    files = TraceFiles.at(trace) if trace is not None else None
    timelines: list[Timeline] | None = [] if files is not None else None
    rows: list[WorkloadRow] = []
    runs = len(names) * (len(depths) + peers)
    print(HEADER)
    try:
        with tempfile.TemporaryDirectory() as folder, progress_bar("measuring", runs, "run") as bar:
            for row in measure(names, depths, Path(folder), timelines, peers=peers and is_installed(), kernels=kernels):
                if isinstance(row, WorkloadRow):
                    rows.append(row)
                    _write_rows(rows, json_path)  # at once: a run takes minutes
                bar.write(_line(row) if isinstance(row, WorkloadRow) else row, sys.stdout)
                bar.advance(1)
    finally:
        _finish(rows, files, timelines, plot_path)
    if peers and not is_installed():
        print("not installed: transformers")
    return 0


def _finish(
    rows: Sequence[WorkloadRow], files: TraceFiles | None, timelines: list[Timeline] | None, plot_path: str | None
) -> None:
    """Print and draw the results of all rows together."""
    from gapless.bench.chart import bar_chart

    print(*dict.fromkeys(text for row in rows for text in (row.graphs, row.attention) if text), sep="\n")
    for row in rows:
        if row.kernels is not None:
            print(f"\nkernels of {row.workload}, {_engine(row)}: {row.kernels}")
    if files is not None and timelines:
        files.write(timelines)
        print(f"timeline: {files}")
    if plot_path is not None and rows:
        subtitle = "ms a decode step, each group to its own scale; red: the bytes that must move, at the read rate"
        Path(plot_path).write_text(bar_chart(chart_groups(rows), "GPU workloads", subtitle))


def _write_rows(rows: Sequence[WorkloadRow], path: str | None) -> None:
    from gapless.bench.machine import this_machine

    if path is not None:
        values = {"machine": asdict(this_machine()), "rows": [asdict(row) for row in rows]}
        Path(path).write_text(json.dumps(values, indent=2) + "\n")


def chart_groups(rows: Sequence[WorkloadRow]) -> list[Group]:
    """Time of a step, a group for each workload."""
    groups = []
    for name in dict.fromkeys(row.workload for row in rows):
        chosen = [row for row in rows if row.workload == name]
        bars = tuple(
            ChartBar(_engine(row), row.ms_per_step, f"{row.ms_per_step:.2f}", row.depth is not None, limit=row.limit_ms)
            for row in chosen
        )
        work = WORKLOADS[name]
        lengths = f"{'up to ' if work.mixed else ''}{work.prompt_tokens} + {work.max_tokens} tokens"
        title = f"{name}: {work.shape}, {work.num_requests} requests of {lengths}"
        groups.append(Group(title, bars, scale=1 / max(row.ms_per_step for row in chosen)))
    return groups


def _engine(row: WorkloadRow) -> str:
    return row.engine if row.depth is None else f"{row.engine}, depth {row.depth}"


HEADER = "workload engine                       s  ms/step    tok/s   limit of limit   idle  host ms start s    GiB"


def _line(row: WorkloadRow) -> str:
    from gapless.report import idle_line

    ours = f"{'':>15}"
    if row.idle_share is not None:
        ours = f"{row.idle_share:>6.1%} {row.host_ms_per_step:>8.3f}"
    line = (
        f"{row.workload:>8} {_engine(row):<27}{row.seconds:>5.2f} {row.ms_per_step:>8.3f} {row.tokens_per_s:>8.0f} "
        f"{row.limit_ms:>7.3f} {row.limit_share:>8.1%} {ours} {row.start_s:>7.1f} {row.peak_gib:>6.1f}"
    )
    return f"{line}\n{'':>9}{idle_line(row.idle_by_cause, row.seconds)}" if row.idle_by_cause else line
