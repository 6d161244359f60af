"""The results of the GPU workloads: a row for each engine, and rows as a table, a chart and a file.

A limit is the least time for a workload on this machine: the bytes that decode steps must read at the measured read
rate, plus the operations of the prompts at the measured rate of a large product.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gapless.bench.chart import ChartBar, Group
from gapless.bench.kernels import KernelTable
from gapless.bench.workload_jobs import WORKLOADS, Workload, decode_bytes, prefill_operations

PRODUCT_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Rates:
    """The speed of this GPU, measured: bytes read a second, and operations of a large product a second."""

    bytes_per_s: float
    operations_per_s: float

    def limit_s(self, work: Workload, prompts: Sequence[Sequence[int]]) -> float:
        """The least time for a workload."""
        decode_s = decode_bytes(work, prompts) / self.bytes_per_s
        return decode_s + prefill_operations(work, prompts) / self.operations_per_s


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """One workload by one engine, run twice. Unless named otherwise, figures are of the second run."""

    workload: str
    engine: str
    first_s: float  # the first time that this process ran the workload
    seconds: float
    ms_per_step: float  # by the fewest steps that the workload takes
    tokens_per_s: float
    limit_s: float
    limit_share: float
    start_s: float
    peak_gib: float
    depth: int | str | None = None  # as asked for; this and the following are known only for Gapless
    last_depth: int | None = None  # of "auto", at the end
    num_steps: int | None = None  # that it took
    idle_share: float | None = None  # of the compute stream, in the run
    host_ms_per_step: float | None = None  # processor time of the loop
    idle_by_cause: dict[str, float] = field(default_factory=dict)  # seconds of the compute stream
    first_ledger: dict[str, int] = field(default_factory=dict)  # fast paths missed in the first run, by reason
    ledger: dict[str, int] = field(default_factory=dict)
    graphs: str = ""  # what capturing took
    attention: str = ""  # which one ran, and why
    kernels: KernelTable | str | None = None  # of a decode step halfway through, or why they are not known

    @property
    def label(self) -> str:
        return self.engine if self.depth is None else f"{self.engine}, depth {self.depth}"


def timed_row(
    name: str, engine: str, first_s: float, seconds: float, rates: Rates, *, start_s: float, peak_gib: float
) -> WorkloadRow:
    """A row with all figures that follow from the times of two runs."""
    work = WORKLOADS[name]
    limit_s = rates.limit_s(work, work.prompts())
    return WorkloadRow(
        workload=name,
        engine=engine,
        first_s=first_s,
        seconds=seconds,
        ms_per_step=seconds / work.num_steps * 1e3,
        tokens_per_s=sum(work.counts()) / seconds,
        limit_s=limit_s,
        limit_share=limit_s / seconds,
        start_s=start_s,
        peak_gib=peak_gib,
    )


def in_unit(work: Workload, seconds: float) -> float:
    """A time of the whole workload in the unit in which it is compared."""
    return seconds if work.unit == "s" else seconds / work.num_steps * 1e3


HEADER = (
    f"{'workload':>8} {'engine':<36}{'unit':<8}{'first':>8}{'again':>8}{'limit':>8}{'of it':>7}{'tok/s':>9}"
    f"{'idle':>7}{'host ms':>9}{'start s':>9}{'GiB':>7}"
)


def format_row(row: WorkloadRow) -> str:
    """A line of the table; below it, why the device idled and which fast paths were missed."""
    from gapless.report import idle_line

    work = WORKLOADS[row.workload]
    first, again, limit = (f"{in_unit(work, s):>8.3f}" for s in (row.first_s, row.seconds, row.limit_s))
    ours = f"{'':>16}"
    if row.idle_share is not None:
        ours = f"{row.idle_share:>7.1%}{row.host_ms_per_step:>9.3f}"
    lines = [
        f"{row.workload:>8} {row.label:<36}{work.unit:<8}{first}{again}{limit}{row.limit_share:>7.1%}"
        f"{row.tokens_per_s:>9.0f}{ours}{row.start_s:>9.1f}{row.peak_gib:>7.1f}"
    ]
    if row.idle_by_cause:
        lines.append(idle_line(row.idle_by_cause, row.seconds))
    ledgers = {"first": row.first_ledger, "again": row.ledger}
    lines += [f"ledger, {run}: {_counts(found)}" for run, found in ledgers.items() if found]
    if row.depth == "auto":
        lines.append(f"depth at the end: {row.last_depth}")
    return f"\n{'':>9}".join(lines)


def _counts(ledger: Mapping[str, int]) -> str:
    return ", ".join(f"{why} {count}" for why, count in ledger.items())


def write_rows(rows: Sequence[WorkloadRow], rates: Rates | None, path: str | None) -> None:
    """All rows with the machine and its measured rates, as JSON."""
    from gapless.bench.machine import this_machine

    if path is not None:
        measured = None if rates is None else asdict(rates)
        values = {"machine": asdict(this_machine()), "rates": measured, "rows": [asdict(row) for row in rows]}
        Path(path).write_text(json.dumps(values, indent=2) + "\n")


def chart_groups(rows: Sequence[WorkloadRow]) -> list[Group]:
    """Time in the unit of each workload, a group for each."""
    groups = []
    for name in dict.fromkeys(row.workload for row in rows):
        work = WORKLOADS[name]
        bars = [_bar(work, row) for row in rows if row.workload == name]
        lengths = f"{'up to ' if work.mixed else ''}{work.prompt_tokens} + {work.max_tokens} tokens"
        title = f"{name}: {work.shape}, {work.num_requests} requests of {lengths}, {work.unit}"
        groups.append(Group(title, tuple(bars), scale=1 / max(bar.value for bar in bars)))
    return groups


def _bar(work: Workload, row: WorkloadRow) -> ChartBar:
    value, limit = in_unit(work, row.seconds), in_unit(work, row.limit_s)
    return ChartBar(row.label, value, f"{value:.2f}", row.depth is not None, limit=limit)


def measure_rates() -> Rates:
    """Both rates of the first GPU."""
    import torch

    from gapless.device.cuda import CudaDevice, replay_s

    device = CudaDevice()
    bytes_per_s = device.read_rate()
    sizes = (PRODUCT_SIZE, PRODUCT_SIZE)
    left, right = (torch.randn(sizes, dtype=torch.bfloat16, device=device.torch_device) for _ in range(2))
    out = torch.empty_like(left)
    return Rates(bytes_per_s, 2 * PRODUCT_SIZE**3 / replay_s(lambda: torch.mm(left, right, out=out)))
