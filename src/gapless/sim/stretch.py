"""Many steps at once, where nothing changes from one to the next but the lengths of the same decoding rows.

A stretch begins when all running requests decode, none waits, and every step in flight has all rows. It ends before the
first row needs no further step, or earlier, when a request arrives. What the scheduler would have done meanwhile is
made up for in one go: tokens, cursors, blocks, and the prefixes that others can find.

    collected   | 1 2 3 . . . count |                 each round collects a step and plans one
    in flight   .                   | + + |           `depth` steps, before and after
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gapless.core.request import LongArray
from gapless.core.scheduler import Scheduler
from gapless.sim.costs import Costs, StepShape

LEAST = 2  # rounds: fewer are as fast step by step
TOKEN = 5  # every sample


@dataclass(frozen=True, slots=True)
class DecodeStretch:
    """Rounds that may be skipped."""

    rows: LongArray  # that decode
    count: int
    ends_s: npt.NDArray[np.float64]  # [depth + count]: ends of the steps in flight, and of those to come

    def num_before(self, now: float) -> int:
        """Rounds that are over before this time."""
        return int(np.searchsorted(self.ends_s[: self.count], now))


def find_stretch(scheduler: Scheduler, in_flight: Sequence[tuple[int, float]], costs: Costs) -> DecodeStretch | None:
    """The stretch that begins now. in_flight: the decode rows of each step, and when it ends."""
    if scheduler.num_waiting or not in_flight or scheduler.tables.has_windows:
        return None
    table, size = scheduler.rows, scheduler.limits.block_size
    num_rows, depth = scheduler.num_running, len(in_flight)
    if any(decodes != num_rows for decodes, _ in in_flight) or table.num_wide or scheduler.holds:
        return None
    rows = np.flatnonzero(table.decoding)
    if len(rows) != num_rows or (table.pending[rows] != depth).any():
        return None
    count = int((table.ceiling[rows] - table.num_tokens[rows]).min()) - depth
    if count < LEAST:
        return None
    missing = -(-(table.cursor[rows] + count) // size) - table.num_blocks[rows]
    if not scheduler.tables.can_grow(int(np.maximum(missing, 0).sum())):
        return None
    return DecodeStretch(rows, count, _ends(rows, count, int(table.cursor[rows].sum()), in_flight, costs))


def _ends(
    rows: LongArray, count: int, context: int, in_flight: Sequence[tuple[int, float]], costs: Costs
) -> npt.NDArray[np.float64]:
    """Ends of all steps. Each reads one token more of every row than the step before it."""
    first, last = (costs.of(StepShape(len(rows), context + n * len(rows), 0, 0)) for n in (1, count))
    known = [end_s for _, end_s in in_flight]
    return np.concatenate((known, known[-1] + np.cumsum(np.linspace(first, last, count))))


def skip(scheduler: Scheduler, rows: LongArray, count: int) -> None:
    """Leave the scheduler as so many rounds of `commit` and `schedule` would."""
    table = scheduler.rows
    table.cursor[rows] += count
    for row in rows[table.cursor[rows] > table.num_blocks[rows] * scheduler.limits.block_size].tolist():
        scheduler.tables.grow(row, int(table.cursor[row]), lambda: False)
    for row, known in zip(rows.tolist(), table.num_tokens[rows].tolist(), strict=True):
        table.tokens[row, known : known + count] = TOKEN
    table.num_tokens[rows] += count - 1
    for row in rows.tolist():  # a commit registers a block when the token behind it is known
        scheduler.sharing.register(row)
    table.num_tokens[rows] += 1
    scheduler.counters.num_steps += count
    scheduler.counters.num_generated += count * len(rows)
