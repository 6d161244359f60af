"""Records when each step's parts ran, on the host and on the device, and sums up why the device idled.

The loop and the executor report to it: `mark` opens the next phase, `launched` and `collected` name the step. It keeps
the last steps, or all of them, and running sums of idle time by cause. One thread writes, and any thread may read.
Knows no plans, no requests and no tensors: numbers come in, columns come out.
"""

from __future__ import annotations

import gc
import threading
import time
from array import array
from collections import Counter, deque
from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import Any, Protocol

import numpy as np

from gapless.trace.causes import CAUSES, Seconds, attribute, cause_of_wait
from gapless.trace.columns import (
    ADMIT,
    EAGER,
    FILL,
    IDLE,
    NOT_DRY,
    PREEMPTED,
    WAITS,
    Collections,
    Marks,
    Steps,
    join,
)
from gapless.trace.timeline import Timeline, cut

FOLD_STEPS = 256  # steps between two summations
TAIL_STEPS = 150  # most steps in a view of the last seconds
KEPT_STEPS = 4096  # by default
NEVER = float("nan")
# Each row is written at once, so that a concurrent reader sees whole rows.
MARK, LAUNCHED, COLLECTED, COLLECTION = Struct("3d"), Struct("7d"), Struct("11d"), Struct("3d")
MARK_WIDTH, LAUNCHED_WIDTH, COLLECTED_WIDTH, COLLECTION_WIDTH = 3, 7, 11, 3  # numbers in a row
NUM_BLOCKS, FLAGS, QUEUED = 3, 5, 6  # places in a row of a launch
NO_GRAPH = "no graph"  # prefix of the reasons why a step's kernels are launched one by one
STEP_FAILED = "step failed"  # in the ledger; the report looks for it
PACED_SHARE = 0.1  # a step that waited for so much of its time for launches was bound by them


class Counts(Protocol):
    """The scheduler's counters that the recorder watches."""

    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Fold:
    """Consecutive steps, summed up."""

    steps: Steps
    marks: Marks
    collections: Collections


class Recorder:
    """One engine's timeline: of about the last `kept_steps` steps, or of all if that is None."""

    is_timed = True  # each step comes with the times of its parts

    def __init__(
        self,
        *,
        kept_steps: int | None = KEPT_STEPS,
        counts: Counts | None = None,
        missed: Counter[str] | None = None,
    ) -> None:
        self.began = time.perf_counter()
        self.busy_s = 0.0  # of the compute stream
        self.num_blocks_in_flight = 0  # KV blocks added for steps not yet collected
        self.max_blocks_in_flight = 0
        self.ledger: Counter[str] = Counter()  # when overlap was reduced, by reason
        self._counts = counts
        self._missed = missed
        self._num_preemptions = self._num_missed = 0
        self._phase, self._dry = IDLE, NOT_DRY
        self._marks, self._launched, self._collected, self._collections = (array("d") for _ in range(4))  # rows
        self._num_launched = self._num_collected = 0  # since the last fold; in `_launched` some are not collected yet
        self._gc_began = 0.0
        self._thread = 0
        self._lock = threading.Lock()  # of all below, and of taking entries out of the columns
        self._folds: deque[Fold] = deque(maxlen=None if kept_steps is None else -(-kept_steps // FOLD_STEPS))
        self._idle, self._reported = np.zeros(len(CAUSES)), np.zeros(len(CAUSES))
        self._since = self.began  # the compute stream's last end, of folded steps
        self._kept_from = self.began  # the same, of folds that are no longer kept
        gc.callbacks.append(self._on_gc)
        _rehearse()

    # -- the loop's side: every step pays for it --------------------------------------------------------------------

    def mark(self, phase: int) -> None:
        """A host phase begins, and the previous one ends."""
        self._phase = phase
        if phase == FILL:
            self._dry = NOT_DRY
        cpu = time.thread_time() if phase in WAITS else NEVER  # a system call, so once a step
        self._marks.frombytes(MARK.pack(time.perf_counter(), phase | self._dry, cpu))

    def woken(self) -> None:
        """A request arrived while there was nothing to run."""
        self._dry = NOT_DRY
        self.mark(ADMIT)

    def dry(self, reason: int, name: str) -> None:
        """Nothing could be planned, although a step is in flight or a request is held: the pipeline runs empty."""
        if self._dry == NOT_DRY:
            self.ledger[f"pipeline ran dry: {name}"] += 1
        self._dry = reason

    def failed(self) -> None:
        """A step came back with an error: its requests end, and all others are computed again."""
        self.ledger[STEP_FAILED] += 1

    def launched(self, step: int, num_rows: int, num_tokens: int, num_blocks: int) -> None:
        """A step was queued."""
        now = time.perf_counter()
        self.num_blocks_in_flight += num_blocks
        if self.num_blocks_in_flight > self.max_blocks_in_flight:
            self.max_blocks_in_flight = self.num_blocks_in_flight
        self._num_launched += 1
        in_flight = self._num_launched - self._num_collected
        row = LAUNCHED.pack(step, num_rows, num_tokens, num_blocks, in_flight, self._flags(), now)
        self._launched.frombytes(row)
        if self._num_collected >= FOLD_STEPS:  # now, while the device has something to do
            self._fold()

    def collected(self, times: tuple[float, ...]) -> None:
        """The oldest step came back.

        `times`: begin and end of its copy in, its computation and its copy out, then the seconds in which the device
        idled within the computation, in the order of INSIDE.
        """
        row = self._num_collected * LAUNCHED_WIDTH
        took = times[3] - times[2]
        if took > 0:  # not NaN
            self.busy_s += max(took - sum(times[6:]), 0.0)
            if times[6] > PACED_SHARE * took:
                self.ledger["step without a graph, paced by its launch"] += 1
        self.num_blocks_in_flight -= int(self._launched[row + NUM_BLOCKS])
        self._num_collected += 1
        self._collected.frombytes(COLLECTED.pack(time.perf_counter(), *times))

    def start(self) -> None:
        """Must be called by the thread that marks, before its first mark."""
        self._thread = threading.get_ident()
        self.mark(IDLE)
        self.began = self._since = self._kept_from = self._marks[0]

    def close(self) -> None:
        """Recording ends. The recorded data can still be read."""
        if self._on_gc in gc.callbacks:
            gc.callbacks.remove(self._on_gc)

    def _flags(self) -> int:
        flags = 0
        if self._counts is not None and self._counts.num_preemptions != self._num_preemptions:
            self.ledger["preemption"] += self._counts.num_preemptions - self._num_preemptions
            self._num_preemptions = self._counts.num_preemptions
            flags |= PREEMPTED
        if self._missed and (count := sum(n for why, n in list(self._missed.items()) if why.startswith(NO_GRAPH))):
            flags |= EAGER if count != self._num_missed else 0
            self._num_missed = count
        return flags

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began = time.perf_counter()
        if phase == "start" or self._phase == IDLE:  # with nothing to run, nothing is late
            return
        is_own = threading.get_ident() == self._thread
        self._collections.frombytes(COLLECTION.pack(self._gc_began, time.perf_counter(), is_own))

    # -- summing up ---------------------------------------------------------------------------------------------------

    def _open(self) -> Fold:
        """Recorded and collected steps that are not folded. Copies, because the loop continues meanwhile."""
        collected = _columns(self._collected, COLLECTED_WIDTH)
        launched = [column[: len(collected[0])] for column in _columns(self._launched, LAUNCHED_WIDTH)]
        counts = [column.astype(np.int32) for column in launched[:FLAGS]]
        columns = [*counts, launched[FLAGS].astype(np.uint8), launched[QUEUED], *collected]
        times, codes, cpu = _columns(self._marks, MARK_WIDTH)
        begin, end, is_own = _columns(self._collections, COLLECTION_WIDTH)
        return Fold(
            Steps(*columns), Marks(times, codes.astype(np.uint8), cpu), Collections(begin, end, is_own.astype(np.uint8))
        )

    def _fold(self) -> None:
        """Sum up the collected steps, keep them, and remove them from the columns, except where later gaps begin."""
        with self._lock:
            fold = self._open()
            self._idle += attribute(fold.steps, fold.marks, fold.collections, self._since).sum(axis=0)
            self._since = float(np.fmax.reduce(np.append(fold.steps.compute_end, self._since)))
            num_marks = max(int(np.searchsorted(fold.marks.time, self._since)) - 1, 0)
            num_marks = _reading_at(fold.marks, num_marks)
            num_collections = int(np.searchsorted(fold.collections.end, self._since))
            if len(self._folds) == self._folds.maxlen:
                self._kept_from = float(np.fmax.reduce(np.append(self._folds[0].steps.compute_end, self._kept_from)))
            self._folds.append(Fold(fold.steps, fold.marks.part(0, num_marks), _first(fold, num_collections)))
            del self._marks[: num_marks * MARK_WIDTH]
            del self._launched[: len(fold.steps) * LAUNCHED_WIDTH]
            del self._collected[: len(fold.steps) * COLLECTED_WIDTH]
            del self._collections[: num_collections * COLLECTION_WIDTH]
            self._num_launched -= len(fold.steps)
            self._num_collected -= len(fold.steps)

    # -- any thread's side --------------------------------------------------------------------------------------------

    def idle_by_cause(self) -> dict[str, float]:
        """Seconds that the compute stream idled so far, by cause. They only grow."""
        with self._lock:
            fold = self._open()
            total = self._idle + attribute(fold.steps, fold.marks, fold.collections, self._since).sum(axis=0)
            self._add_wait(fold, total)
            # a wait counts while it lasts, and again once the step after it is known: in between it must not vanish
            self._reported = np.maximum(self._reported, total)
            return {name: float(seconds) for name, seconds in zip(CAUSES, self._reported, strict=True)}

    def _add_wait(self, fold: Fold, total: Seconds) -> None:
        """Add a wait for requests, or for the grammar of one, that has not ended yet."""
        cause = cause_of_wait(int(fold.marks.code[-1])) if len(fold.marks) else None
        if cause is not None:
            began = float(np.fmax.reduce(np.append(fold.steps.compute_end, fold.marks.time[-1])))
            total[cause] += max(time.perf_counter() - began, 0)

    def timeline(self, label: str = "", since: float | None = None, **facts: Any) -> Timeline:
        """The kept steps as a value; from `since` on, if given."""
        with self._lock:
            began = self._kept_from if since is None else max(since, self._kept_from)
            folds = [fold for fold in self._folds if fold.steps.collected[-1] >= began]
            folds.append(self._open())
        steps, marks, collections = (join([getattr(fold, name) for fold in folds]) for name in Fold.__slots__)
        whole = Timeline(label, self.began, time.perf_counter(), steps, marks, collections, facts)
        return cut(whole, began)

    def tail(self, seconds: float) -> dict[str, Any]:
        """The four lanes of the last seconds, as lists of [begin, end, name, step]; times are negative, before now.

        Covers fewer seconds than requested, as "seconds" says, if they have too many steps.
        """
        now = time.perf_counter()
        found = self.timeline(since=now - seconds)
        if len(found.steps) > TAIL_STEPS:
            found = cut(found, float(found.steps.collected[-TAIL_STEPS]))
            seconds = now - found.began
        return {"seconds": seconds, **found.lanes(now)}


@cache
def _rehearse() -> None:
    """Sum up a step of no meaning: the first sum of a process loads parts of numpy, and no step should wait for it."""
    moments, zeros = np.arange(4.0), np.zeros(1, np.uint8)
    columns: list[Any] = [*(np.zeros(1, np.int32) for _ in range(5)), zeros, *(np.ones(1) for _ in range(12))]
    marks = Marks(moments, np.array([IDLE, FILL, IDLE, FILL], np.uint8), moments)
    attribute(Steps(*columns), marks, Collections(moments[1:2], moments[2:3], zeros), 0.0)


def _columns(rows: array[float], width: int) -> list[Any]:
    """Copies of the columns of consecutive rows."""
    table = np.array(rows[:]).reshape(-1, width)
    return [np.ascontiguousarray(table[:, i]) for i in range(width)]


def _reading_at(marks: Marks, index: int) -> int:
    """The last mark up to this one with a reading of processor time; the time between readings is not split."""
    known = np.flatnonzero(~np.isnan(marks.cpu[: index + 1]))
    return int(known[-1]) if len(known) else 0


def _first(fold: Fold, count: int) -> Collections:
    found = fold.collections
    return Collections(found.begin[:count], found.end[:count], found.is_own[:count])
