"""The loop: admit, schedule, launch, collect, commit.

    depth 1   plan 1 | wait 1 | plan 2 | wait 2 | ...          the device idles while the host plans
    depth 2   plan 1 | plan 2 | wait 1 | plan 3 | wait 2 | ... the device always has a step queued

Synchronous and asynchronous batching are this one function; only `depth` differs. A step whose tokens are masked is
launched in two halves. Its masks may follow from the steps before it; these are settled while its model runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from gapless.core.outcome import Commit
from gapless.core.plan import Plan
from gapless.core.scheduler import Scheduler
from gapless.errors import StepFailed
from gapless.pipeline.control import Control
from gapless.pipeline.executor import Executor, Ticket
from gapless.trace.columns import ADMIT, COMMIT, DELIVER, DRY_DONE, DRY_GRAMMAR, DRY_MEMORY, DRY_ROWS, IDLE, SCHEDULE
from gapless.trace.null_recorder import UNRECORDED
from gapless.trace.recorder import Recorder


class Depth(Protocol):
    """How many steps may be in flight, now."""

    depth: int
    decided: bool
    num_reduced: int  # times that it became smaller

    def observe(self, plan: Plan) -> None:
        """A step was launched."""


def run_loop(
    scheduler: Scheduler,
    executor: Executor,
    depth: Depth,
    admit: Callable[[bool], bool],
    deliver: Callable[[Commit], None],
    recorder: Recorder = UNRECORDED,
) -> None:
    """Run until `admit` says there is nothing more to come and everything in flight has come back.

    `admit(idle)` brings new requests and aborts to the scheduler, waiting for some when idle, and returns False to
    stop. `deliver` takes what each step brought. The recorder is told of each phase as it begins.
    """
    mark, control = recorder.mark, Control(scheduler, recorder)
    in_flight: deque[Ticket] = deque()
    more = True  # once `admit` says no, it is not asked again: idle, it would wait for ever

    def settle_next() -> Commit:
        return settle(scheduler, executor, in_flight.popleft(), recorder, control)

    while (more := more and admit(not in_flight and not scheduler.can_run)) or in_flight:
        mark(SCHEDULE)
        plan = scheduler.schedule()
        if plan is not None:
            in_flight.append(executor.launch(plan))
            depth.observe(plan)
        elif in_flight or scheduler.holds:
            recorder.dry(*why_dry(scheduler))
        assert in_flight or not scheduler.can_run, "requests are here, and nothing can run"
        commits: list[Commit] = []
        if plan is not None and plan.is_split:
            commits += [settle_next() for _ in range(len(in_flight) - 1 if plan.waits else 0)]
            in_flight[-1], foreseen = control.complete(executor, in_flight[-1])
            commits += [foreseen] if foreseen.num_tokens or foreseen.finished else []
        num_due = 1 if plan is None else len(in_flight) - depth.depth + 1
        commits += [settle_next() for _ in range(min(num_due, len(in_flight)))]
        for commit in commits:
            mark(DELIVER)
            deliver(commit)
        mark(ADMIT if in_flight or scheduler.can_run else IDLE)


def settle(
    scheduler: Scheduler,
    executor: Executor,
    ticket: Ticket,
    recorder: Recorder = UNRECORDED,
    control: Control | None = None,
) -> Commit:
    """Wait for a step and turn its results into facts; a step that raised fails its own requests only."""
    try:
        results = executor.collect(ticket)
    except StepFailed as error:
        recorder.mark(COMMIT)
        return scheduler.fail(ticket.plan, error)
    recorder.mark(COMMIT)
    if control is not None and ticket.plan.is_split:
        return control.commit(ticket, results)
    return scheduler.commit(ticket.plan, results)


def why_dry(scheduler: Scheduler) -> tuple[int, str]:
    """Why nothing could be planned: nobody waits, or for a grammar, for memory, or for a row."""
    if scheduler.num_waiting <= len(scheduler.holds):
        return (DRY_GRAMMAR, "requests are held") if scheduler.holds else (DRY_DONE, "everything is in flight")
    return (DRY_MEMORY, "no free block") if scheduler.rows.num_free else (DRY_ROWS, "no free row")
