"""Many schedules in a row: plays each at several depths, adds up the results, and shrinks the first failure.

Owns the order of work of a check. The caller provides schedules and takes results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from gapless.proof.judge import Judge, Verdict
from gapless.proof.play import Trouble
from gapless.proof.report import Tally
from gapless.proof.schedule import Schedule
from gapless.proof.shrink import shrink
from gapless.proof.stage import Room

Found = tuple[Schedule, Trouble]


def examine(
    judge: Judge,
    schedules: Iterable[Schedule],
    depths: Sequence[int],
    tally: Tally,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> Found | None:
    """Play every schedule at every depth; return the first that fails."""
    first: Found | None = None
    for schedule in schedules:
        for depth in depths:
            candidate = replace(schedule, depth=depth)
            verdict = judge.verdict(candidate)
            tally.add(verdict)
            on_verdict(verdict)
            if verdict.trouble is not None and first is None:
                first = candidate, verdict.trouble
    return first


def smallest(judge: Judge, found: Found, room: Room) -> Found:
    """The smallest schedule that fails in the same way, and how it fails."""
    schedule, trouble = found
    troubles = {schedule: trouble}

    def fails(candidate: Schedule) -> bool:
        again = judge.verdict(candidate).trouble
        if again is None or again.kind != trouble.kind:
            return False
        troubles[candidate] = again
        return True

    shrunk = shrink(schedule, fails, most_blocks=room.limits(schedule.block_size).num_blocks).schedule
    return shrunk, troubles[shrunk]
