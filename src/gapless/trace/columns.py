"""The parts of a recording: columns of steps, of host phases and of garbage collections, all on one clock.

Values only, with times in seconds of `time.perf_counter`. `recorder` fills them, and `causes` interprets them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Codes = npt.NDArray[np.uint8]

# What the loop's thread does. It is always in one phase, from one mark to the next.
PHASES = ("idle", "admit", "schedule", "fill", "launch", "collect", "commit", "masks", "deliver")
IDLE, ADMIT, SCHEDULE, FILL, LAUNCH, COLLECT, COMMIT, MASKS, DELIVER = range(len(PHASES))
WAITS = (IDLE, COLLECT)  # phases in which it sleeps on purpose

# Why nothing could be planned while a step was in flight or a request was held. Added to the phases that follow, until
# a plan is found.
NOT_DRY, DRY_DONE, DRY_ROWS, DRY_MEMORY, DRY_GRAMMAR = 0, 16, 32, 48, 64
DRY_MASK, PHASE_MASK = 112, 15

# Special properties of a step.
EAGER, CAPTURED, PREEMPTED = 1, 2, 4

# Why the device idled within a computation, in the order of the columns of a step.
INSIDE = ("launch", "compile", "allocation", "masks")

LANES = ("cpu", "h2d", "gpu", "d2h")


@dataclass(frozen=True, slots=True)
class Steps:
    """One entry a step, in the order of launch. Device times are NaN where a step failed before it ran."""

    step: Ints
    num_rows: Ints  # that sample a token
    num_tokens: Ints  # fed to the model
    num_blocks: Ints  # KV blocks added for it
    in_flight: Ints  # steps, this one included, once it was launched
    flags: Codes
    queued: Times  # when `launch` had queued all of it
    collected: Times  # when its tokens had arrived
    h2d_begin: Times
    h2d_end: Times
    compute_begin: Times
    compute_end: Times
    d2h_begin: Times
    d2h_end: Times
    idle_launch: Times  # seconds within the computation in which the device idled, by cause
    idle_compile: Times
    idle_allocation: Times
    idle_masks: Times

    def __len__(self) -> int:
        return len(self.step)

    @property
    def idle_inside(self) -> Times:
        """[num_steps, len(INSIDE)], at most as long as the computation."""
        found: Times = np.stack([getattr(self, f"idle_{cause}") for cause in INSIDE], axis=1)
        total = found.sum(axis=1)
        took = np.nan_to_num(np.maximum(self.compute_end - self.compute_begin, 0))
        scale = np.where(total > took, took / np.maximum(total, 1e-12), 1.0)
        return found * scale[:, None]

    def part(self, begin: int, end: int | None = None) -> Steps:
        return Steps(*(getattr(self, f.name)[begin:end] for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Marks:
    """One entry a host phase: when it began. It ended when the next one began."""

    time: Times
    code: Codes  # phase, and why the pipeline was dry
    cpu: Times  # processor time of the loop's thread so far: read where a wait begins, else NaN

    def __len__(self) -> int:
        return len(self.time)

    def part(self, begin: int, end: int | None = None) -> Marks:
        return Marks(self.time[begin:end], self.code[begin:end], self.cpu[begin:end])


@dataclass(frozen=True, slots=True)
class Collections:
    """Garbage collections. They stop every thread of the process."""

    begin: Times
    end: Times
    is_own: Codes  # ran on the loop's own thread


def join(parts: list[Any]) -> Any:
    """Columns of several parts, end to end."""
    kind = type(parts[0])
    return kind(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(kind)))
