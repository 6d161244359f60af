"""Requests that are held: out of every plan, counted, and with the same tokens in the end."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeExecutor, Run, check_empty, drive, make_limits, make_request, truth, turn
from gapless.core.scheduler import Scheduler
from gapless.pipeline.executor import Ticket

LIMITS = make_limits()


def rows_of(run: Run, step: int) -> list[int]:
    plan = run.executor.launched[step]
    return [*plan.decode_rows.tolist(), *(chunk.row for chunk in plan.chunks)]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_held_row_is_in_no_plan_and_keeps_its_place(depth: int) -> None:
    run = Run(Scheduler(LIMITS), FakeExecutor(LIMITS))
    held, other = make_request("held", [1, 2, 3], LIMITS), make_request("other", [4, 5], LIMITS)
    for request in (held, other):
        run.scheduler.add(request)
    in_flight: deque[Ticket] = deque()
    turn(run, in_flight, depth)
    row, first = held.row, len(run.executor.launched)
    run.scheduler.hold("held", "a mask")
    for _ in range(4):
        turn(run, in_flight, depth)
    assert held.row == row
    assert all(row not in rows_of(run, step) for step in range(first, len(run.executor.launched)))
    assert run.scheduler.holds.counts == {"a mask": 4}
    run.scheduler.release("held")
    while run.scheduler.has_requests or in_flight:
        turn(run, in_flight, depth)
    for request in (held, other):
        assert (run.tokens(request.id), run.finished[request.id].reason) == truth(request)
    assert run.scheduler.holds.counts == {"a mask": 4}
    check_empty(run.scheduler)


def test_a_request_can_be_held_in_the_queue_and_in_mid_prompt() -> None:
    limits = make_limits(max_batch_tokens=4)
    run = Run(Scheduler(limits), FakeExecutor(limits))
    waiting, long = make_request("waiting", [9], limits), make_request("long", [1] * 10, limits)
    for request in (waiting, long):
        run.scheduler.add(request)
    in_flight: deque[Ticket] = deque()
    run.scheduler.hold("waiting", "first")
    turn(run, in_flight, 1)
    assert (waiting.row, long.row >= 0) == (-1, True)  # the one behind it is not held up
    run.scheduler.hold("long", "second")
    run.scheduler.release("waiting")
    turn(run, in_flight, 1)
    assert waiting.row >= 0
    assert rows_of(run, 1) == [waiting.row]
    run.scheduler.release("long")
    while run.scheduler.has_requests or in_flight:
        turn(run, in_flight, 1)
    assert run.tokens("long") == truth(long)[0]


def test_when_all_are_held_there_is_no_plan() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(make_request("a", [1, 2], LIMITS))
    scheduler.hold("a", "x")
    assert scheduler.schedule() is None
    scheduler.abort("a")
    assert len(scheduler.holds) == 0
    check_empty(scheduler)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=5),
    st.dictionaries(
        st.integers(0, 15), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=2), max_size=5
    ),
    st.integers(1, 3),
    st.integers(5, 20),
)
def test_holding_changes_no_token(sizes, holds, depth: int, num_blocks: int) -> None:
    """Whoever is held and when, with preemptions in between."""
    limits = make_limits(num_blocks=num_blocks, max_batch_tokens=8, max_model_len=20)
    requests = [
        make_request(str(i), [1 + (i + j) % 40 for j in range(length)], limits, max_tokens=count)
        for i, (length, count) in enumerate(sizes)
    ]
    named = {turn: [(str(i), count) for i, count in pairs] for turn, pairs in holds.items()}
    run = drive(limits, {0: requests}, depth=depth, holds=named)
    for request in requests:
        assert (run.tokens(request.id), run.finished[request.id].reason) == truth(request)
    check_empty(run.scheduler)
