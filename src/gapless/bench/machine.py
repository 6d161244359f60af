"""The machine and software of a benchmark: a speed is meaningless without them."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from gapless import __version__

BUSY_LOAD = 0.5  # processors in use by others before the start


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, and the load on it before the benchmark."""

    cpu: str
    num_cpus: int
    memory_bytes: int
    load: float  # average of the last minute
    python: str
    torch: str
    gapless: str
    commit: str  # of the checkout that runs; "+" when it has changes

    @property
    def is_busy(self) -> bool:
        return self.load > BUSY_LOAD


def this_machine() -> Machine:
    """The current machine, now."""
    return Machine(
        cpu=_cpu_name(),
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        load=os.getloadavg()[0],
        python=platform.python_version(),
        torch=version("torch"),
        gapless=__version__,
        commit=_commit(),
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str:
    """Empty outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def processor_wait_s() -> float | None:
    """How long the threads of this process have waited for a processor, in sum. None where nobody counts it.

    Only threads that live are counted, so a difference of two readings may miss those that ended between them.
    """
    try:
        files = [path.read_text().split() for path in Path("/proc/self/task").glob("*/schedstat")]
        return sum(int(fields[1]) for fields in files) / 1e9 if files else None
    except (OSError, IndexError, ValueError):
        return None
