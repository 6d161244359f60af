"""The kernels of a decode step, how long each takes, and for how long none runs.

From PyTorch's profiler, over some steps of a workload halfway through its run. A kernel's time lasts from its first
program to its last, including the wait for the previous kernel. With programmatic dependent launch kernels overlap, so
their times add up to more than the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NUM_STEPS = 24
FIRST, LAST = "_begin", "_end"  # the kernels at the two ends of a captured decode step
COPIES = ("Memcpy HtoD", "Memcpy DtoH")  # on streams of their own
NAME_WIDTH = 60


@dataclass(frozen=True, slots=True)
class Launch:
    """One run of a kernel, in µs of the profiler's clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class KernelRow:
    """All launches of one kernel."""

    name: str
    calls_per_step: float
    us_per_call: float
    us_per_step: float


@dataclass(frozen=True, slots=True)
class KernelTable:
    """A mean step. `idle_us`: no kernel ran, not even a waiting one."""

    num_steps: int
    step_us: float
    idle_us: float
    rows: tuple[KernelRow, ...]  # the most expensive first

    def __str__(self) -> str:
        calls = sum(row.calls_per_step for row in self.rows)
        head = (
            f"{self.num_steps} steps of {self.step_us:.0f} µs, {calls:.0f} kernels each; "
            f"none ran for {self.idle_us:.1f} µs"
        )
        lines = [
            f"{row.us_per_step:>9.1f} {row.us_per_step / self.step_us:>6.1%} {row.calls_per_step:>7.1f} "
            f"{row.us_per_call:>8.2f}  {row.name[:NAME_WIDTH]}"
            for row in self.rows
        ]
        return "\n".join((head, "  µs/step  share   calls  µs/call  kernel", *lines))


def decode_steps(launches: Sequence[Launch]) -> tuple[list[Launch], int]:
    """The launches of the first `NUM_STEPS` captured decode steps, or as many as there are, and their number.

    The very first step is left out: the GPU may have waited before it.
    """
    ordered = sorted(launches, key=lambda launch: launch.start)
    begins = [index for index, launch in enumerate(ordered) if launch.name == FIRST]
    ends = [index for index, launch in enumerate(ordered) if launch.name == LAST]
    if len(begins) < 3 or len(ends) != len(begins):
        raise ValueError(f"the profiler saw {len(begins)} decode steps begin and {len(ends)} end")
    num_steps = min(NUM_STEPS, len(begins) - 1)
    return ordered[begins[1] : ends[num_steps] + 1], num_steps


def tabulate(launches: Sequence[Launch], num_steps: int) -> KernelTable:
    """A mean step of the launches of exactly this many steps."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for launch in launches:
        by_name[launch.name].append(launch.end - launch.start)
    rows = [
        KernelRow(name, len(times) / num_steps, sum(times) / len(times), sum(times) / num_steps)
        for name, times in by_name.items()
    ]
    idle, reached = 0.0, launches[0].start
    for launch in launches:
        idle += max(0.0, launch.start - reached)
        reached = max(reached, launch.end)
    span = reached - launches[0].start
    ranked = sorted(rows, key=lambda row: -row.us_per_step)
    return KernelTable(num_steps, span / num_steps, idle / num_steps, tuple(ranked))


def profiled_tokens(num_prompts: int) -> int:
    """New tokens of each request: at most one in each step that prefills, then one in each decode step."""
    return num_prompts + NUM_STEPS + 1


def profile_decode(llm: Any, prompts: Sequence[Sequence[int]]) -> KernelTable:
    """Decode some steps after these prompts, all of which fit into the rows, and list their kernels.

    Long prompts are prefilled over several steps, at least one prompt in each. The number of new tokens is so large
    that the first request still decodes, beside all others, when the measured steps are over.
    """
    from torch.profiler import ProfilerActivity, profile

    from gapless import SamplingParams

    params = SamplingParams(max_tokens=profiled_tokens(len(prompts)), temperature=0, ignore_eos=True)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        llm.generate(prompts, params)
    launches = [
        Launch(event.name, event.time_range.start, event.time_range.end)
        for event in seen.events() or ()
        if event.device_type.name == "CUDA" and not event.name.startswith(COPIES)
    ]
    return tabulate(*decode_steps(launches))
