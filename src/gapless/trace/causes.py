"""Why the compute stream idled: a pure function over recorded columns.

Before each step there may be a gap, from the end of the previous step to its own start. The gap has two parts.

    compute  [==== n-1 ====]                                               [==== n ====]
    host       collect     | commit | deliver | admit | schedule | fill | launch |
                           a.............. the host was late ....................q....b
                                                                   copy late, hand-over

From `a` to `q`, when the step had been queued, the host was late, and its activity is the cause: a phase, a garbage
collection, the interpreter lock, or nothing to plan. From `q` to `b` the copy of the plan had not arrived, or the
device's streams were handing over to each other.

A step may also have idle time within it, where its kernels are launched one by one. The device measures that itself,
and the step comes with it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gapless.trace.columns import (
    CAPTURED,
    COLLECT,
    DRY_DONE,
    DRY_GRAMMAR,
    DRY_MASK,
    DRY_MEMORY,
    DRY_ROWS,
    EAGER,
    IDLE,
    INSIDE,
    LAUNCH,
    PHASE_MASK,
    PHASES,
    PREEMPTED,
    SCHEDULE,
    WAITS,
    Codes,
    Collections,
    Marks,
    Steps,
    Times,
)

HOST_LATE = tuple(f"host: {name}" for name in PHASES[1:])
CAUSES = (
    "nothing to run",
    *HOST_LATE,
    "garbage collection",
    "interpreter lock",
    "copy late",
    "hand-over",
    "memory pressure",
    "no free row",
    "grammar",
    "eager fallback",
    "graph capture",
    "unknown",
    *INSIDE,
)
NOTHING = 0
FIRST_INSIDE = len(CAUSES) - len(INSIDE)  # causes before this one are of gaps, the others of time within steps
GC, LOCK, COPY, HANDOVER, MEMORY, ROWS, GRAMMAR, EAGER_FALLBACK, CAPTURE, UNKNOWN = range(len(PHASES), FIRST_INSIDE)
DRY_CAUSE = {DRY_DONE: NOTHING, DRY_ROWS: ROWS, DRY_MEMORY: MEMORY, DRY_GRAMMAR: GRAMMAR}
# a step's flag, the host phase that it lengthens, and the resulting cause
SPECIAL = (
    (PREEMPTED, SCHEDULE, MEMORY),
    (EAGER, LAUNCH, EAGER_FALLBACK),
    (CAPTURED, LAUNCH, CAPTURE),
)
Seconds = npt.NDArray[np.float64]


def attribute(steps: Steps, marks: Marks, collections: Collections, since: float) -> Seconds:
    """Seconds by step and cause, [num_steps, num_causes]: the idle time of the compute stream before each step, and
    from FIRST_INSIDE on within it.

    `since` is when the compute stream was last known to be busy, or the start of the recording.
    """
    found = np.zeros((len(steps), len(CAUSES)))
    if len(steps) == 0:
        return found
    begin, end = gaps(steps, since)
    queued = np.clip(steps.queued, begin, end)
    if len(marks) > 1:
        clock = _HostClock(marks, collections)
        found += clock.at(queued) - clock.at(begin)
    earlier = np.concatenate(([-np.inf], steps.h2d_end[:-1]))  # the previous copy: while it runs, ours cannot begin
    copying = np.where(earlier > queued, queued, steps.h2d_begin)
    copy = _overlap(queued, end, copying, steps.h2d_end)
    found[:, COPY] += copy
    found[:, HANDOVER] += end - queued - copy
    for flag, phase, cause in SPECIAL:
        chosen = (steps.flags & flag) != 0
        found[chosen, cause] += found[chosen, phase]
        found[chosen, phase] = 0
    found[:, UNKNOWN] = np.maximum(end - begin - found[:, :UNKNOWN].sum(axis=1), 0)
    found[:, FIRST_INSIDE:] = steps.idle_inside
    return found


def gaps(steps: Steps, since: float) -> tuple[Times, Times]:
    """Start and end of the idle time before each step; equal where there is none."""
    ends = np.fmax.accumulate(np.concatenate(([since], steps.compute_end)))
    begin: Times = ends[:-1]
    return begin, np.fmax(steps.compute_begin, begin)


def _overlap(begin: Times, end: Times, other_begin: Times, other_end: Times) -> Times:
    length = np.minimum(end, other_end) - np.maximum(begin, other_begin)
    return np.where(np.isnan(length), 0, np.maximum(length, 0))


class _HostClock:
    """The time that the host had spent on each cause up to any moment."""

    def __init__(self, marks: Marks, collections: Collections) -> None:
        bounds, phase, collecting = _segments(marks, collections)
        length = np.diff(bounds)
        lock = _lock_share(marks, collections)[phase]
        spent = np.zeros((len(bounds), len(CAUSES)))
        rows = np.arange(1, len(bounds))
        spent[rows, _cause(marks.code[phase])] = np.where(collecting, 0, length * (1 - lock))
        spent[1:, LOCK] = np.where(collecting, 0, length * lock)
        spent[1:, GC] = np.where(collecting, length, 0)
        self._bounds = bounds
        self._spent = spent.cumsum(axis=0)

    def at(self, moment: Times) -> Seconds:
        """Seconds by moment and cause; nothing is known before the first mark or after the last."""
        index = np.clip(np.searchsorted(self._bounds, moment, "right") - 1, 0, len(self._bounds) - 2)
        left, right = self._bounds[index], self._bounds[index + 1]
        share = np.clip((moment - left) / np.maximum(right - left, 1e-12), 0, 1)[:, None]
        before, after = self._spent[index], self._spent[index + 1]
        return np.asarray(before + share * (after - before))


def _segments(marks: Marks, collections: Collections) -> tuple[Times, npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """The host's time, split at marks and at the ends of collections: bounds, phase, and whether it collected."""
    if len(collections.begin) == 0:
        return marks.time, np.arange(len(marks) - 1), np.zeros(len(marks) - 1, np.bool_)
    cuts = np.concatenate((collections.begin, collections.end))
    cuts = cuts[(cuts > marks.time[0]) & (cuts < marks.time[-1])]
    bounds = np.unique(np.concatenate((marks.time, cuts)))
    middle = (bounds[:-1] + bounds[1:]) / 2
    phase = np.searchsorted(marks.time, middle, "right") - 1
    found = np.searchsorted(collections.begin, middle, "right") - 1
    collecting = (found >= 0) & (middle < collections.end[np.maximum(found, 0)])
    return bounds, phase, collecting


def _lock_share(marks: Marks, collections: Collections) -> Times:
    """Of each phase, the part in which the thread wanted to run and could not: its wall time without processor time.

    The processor time is read where waits begin, so phases between two waits share one figure. A wait itself takes next
    to none. The missing time was taken by other threads: they held the interpreter lock, or the core on a full machine.
    """
    share = np.zeros(len(marks))
    waits = np.isin(marks.code & PHASE_MASK, WAITS)
    known = np.flatnonzero(waits & ~np.isnan(marks.cpu))
    if len(known) < 2:
        return share
    begin, end = marks.time[known[:-1] + 1], marks.time[known[1:]]  # of the work between two waits
    elsewhere = collections.is_own == 0
    collected = _collected(begin, end, collections.begin[elsewhere], collections.end[elsewhere])
    wall = end - begin - collected
    lost = np.clip(wall - np.diff(marks.cpu[known]), 0, None)
    stretch = np.searchsorted(known, np.arange(len(marks)), "right") - 1
    inside = (stretch >= 0) & (stretch < len(wall)) & ~waits
    share[inside] = np.minimum(lost / np.maximum(wall, 1e-12), 1)[stretch[inside]]
    return share


def _collected(since: Times, until: Times, begin: Times, end: Times) -> Times:
    """Time in collections between pairs of moments."""
    if len(begin) == 0:
        return np.zeros(len(since))
    corners = np.stack((begin, end), axis=1).reshape(-1)
    total = np.stack((np.zeros(len(begin)), end - begin), axis=1).reshape(-1).cumsum()
    found: Times = np.interp(until, corners, total) - np.interp(since, corners, total)
    return found


def _cause(codes: Codes) -> npt.NDArray[np.intp]:
    """The cause of a host phase: the phase itself, or the reason why the pipeline was dry."""
    phase = (codes & PHASE_MASK).astype(np.intp)
    for dry, cause in DRY_CAUSE.items():
        phase[((codes & DRY_MASK) == dry) & ((phase != IDLE) | (dry == DRY_GRAMMAR))] = cause
    return phase


def cause_of_wait(code: int) -> int | None:
    """The cause that grows during this host phase, if it is a wait for something to run."""
    if code & PHASE_MASK != IDLE:
        return None
    return GRAMMAR if code & DRY_MASK == DRY_GRAMMAR else NOTHING


assert CAUSES[COLLECT] == "host: collect"  # phases and the causes named after them share their numbers
