"""The loop against an executor of arrays: how many steps are in flight, when it waits, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from fakes import FakeExecutor, make_limits, make_request, truth
from gapless.core.outcome import Commit
from gapless.core.plan import Plan
from gapless.core.request import Request
from gapless.core.scheduler import Scheduler
from gapless.pipeline.depth import FixedDepth
from gapless.pipeline.loop import Depth, run_loop

LIMITS = make_limits()


class Loop:
    """A loop's collaborators, and what it did with them."""

    def __init__(self, *requests: Request, failures: Sequence[int] = ()) -> None:
        self.scheduler = Scheduler(LIMITS)
        self.executor = FakeExecutor(LIMITS, failures)
        self.waiting = list(requests)
        self.idle: list[bool] = []
        self.commits: list[Commit] = []

    def run(self, depth: int | Depth, admit: Callable[[bool], bool] | None = None) -> Loop:
        asked = depth if not isinstance(depth, int) else FixedDepth(depth)
        run_loop(self.scheduler, self.executor, asked, admit or self.admit, self.commits.append)
        return self

    def admit(self, idle: bool) -> bool:
        """All requests at once; no more when they are done."""
        self.idle.append(idle)
        for request in self.waiting:
            self.scheduler.add(request)
        self.waiting.clear()
        return self.scheduler.has_requests

    def results(self) -> dict[str, tuple[list[int], str]]:
        ended = [(item.request, item.reason) for commit in self.commits for item in commit.finished]
        return {request.id: (request.tokens[request.num_prompt :].tolist(), reason) for request, reason in ended}


def some_requests() -> list[Request]:
    return [make_request(str(i), [i + 1] * (i + 2), LIMITS, max_tokens=5 + i) for i in range(6)]


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_depth_is_how_many_steps_are_in_flight(depth: int) -> None:
    requests = some_requests()
    loop = Loop(*requests).run(depth)
    ramp, steady = loop.executor.in_flight[: depth - 1], loop.executor.in_flight[depth - 1 :]
    assert ramp == list(range(1, depth))
    assert max(steady) == depth
    assert loop.results() == {request.id: truth(request) for request in requests}


def test_a_step_is_launched_before_the_one_before_is_collected() -> None:
    order: list[str] = []

    class Noted(FakeExecutor):
        def launch(self, plan: Plan):  # type: ignore[no-untyped-def]
            order.append(f"launch {plan.step}")
            return super().launch(plan)

        def collect(self, ticket):  # type: ignore[no-untyped-def]
            order.append(f"collect {ticket.plan.step}")
            return super().collect(ticket)

    for depth, expected in ((1, "l1 c1 l2 c2 l3 c3"), (2, "l1 l2 c1 l3 c2 c3"), (3, "l1 l2 l3 c1 c2 c3")):
        order.clear()
        loop = Loop(make_request("a", [1, 2], LIMITS, max_tokens=3))
        loop.executor = Noted(LIMITS)
        loop.run(depth)
        assert " ".join(f"{word[0]}{word[-1]}" for word in order) == expected


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_is_in_flight_comes_back_before_the_loop_ends(depth: int) -> None:
    loop = Loop(make_request("a", [1, 2], LIMITS, max_tokens=50))
    turns = iter(range(100))

    def admit(idle: bool) -> bool:
        loop.admit(idle)
        return next(turns) < 5

    loop.run(depth, admit)
    assert len(loop.commits) == len(loop.executor.launched) >= 5
    assert next(turns) == 6, "after it said no, admit is not asked again: idle, it would wait for ever"


def test_a_loop_that_is_told_to_stop_with_all_requests_aborted_ends() -> None:
    loop = Loop(make_request("a", [1, 2], LIMITS, max_tokens=50))
    turns = iter(range(100))

    def admit(idle: bool) -> bool:
        assert not (idle and loop.executor.launched), "asked to wait for requests after it said stop"
        loop.admit(idle)
        if next(turns) < 3:
            return True
        loop.scheduler.abort_all()
        return False

    loop.run(2, admit)
    assert len(loop.commits) == len(loop.executor.launched)


def test_it_is_idle_only_when_nothing_is_here_and_nothing_in_flight() -> None:
    late = make_request("late", [3, 4], LIMITS, max_tokens=3)
    loop = Loop(make_request("a", [1, 2], LIMITS, max_tokens=3))
    idle_at: list[int] = []

    def admit(idle: bool) -> bool:
        if idle:
            idle_at.append(len(loop.commits))
            assert len(loop.commits) == len(loop.executor.launched)
            if len(idle_at) == 2:
                loop.waiting.append(late)
        loop.admit(idle)
        return len(idle_at) < 3

    loop.run(2, admit)
    assert idle_at == [0, 3, 6]
    assert set(loop.results()) == {"a", "late"}


def test_the_depth_may_change_while_it_runs() -> None:
    class Changing:
        depth, decided, num_reduced = 1, False, 0

        def observe(self, plan: Plan) -> None:
            self.depth = 3 if plan.step < 10 else 1

    requests = [make_request("a", [1, 2], LIMITS, max_tokens=30)]
    loop = Loop(*requests).run(Changing())
    assert max(loop.executor.in_flight[:9]) == 3
    assert set(loop.executor.in_flight[11:]) == {1}
    assert loop.results() == {"a": truth(requests[0])}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failed_step_is_delivered_and_the_loop_goes_on(depth: int) -> None:
    early = make_request("early", [1, 2], LIMITS)
    late = make_request("late", [3, 4], LIMITS)
    loop = Loop(early, failures=[3])

    def admit(idle: bool) -> bool:
        loop.admit(idle)
        if idle and loop.commits and not late.was_admitted:
            loop.scheduler.add(late)
        return loop.scheduler.has_requests or not late.was_admitted

    loop.run(depth, admit)
    assert loop.results() == {"early": (truth(early)[0][:2], "error"), "late": truth(late)}


def test_an_error_that_is_no_failed_step_ends_the_loop() -> None:
    class Broken(FakeExecutor):
        def collect(self, ticket):  # type: ignore[no-untyped-def]
            raise KeyError("our bug")

    loop = Loop(*some_requests())
    loop.executor = Broken(LIMITS)
    with pytest.raises(KeyError, match="our bug"):
        loop.run(2)


@pytest.mark.parametrize("depth", [1, 2])
def test_when_every_request_is_held_the_loop_waits_for_news(depth: int) -> None:
    request = make_request("a", [1, 2], LIMITS, max_tokens=6)
    loop = Loop(request)

    def admit(idle: bool) -> bool:
        loop.admit(idle)
        if len(loop.idle) == 3:
            loop.scheduler.hold("a", "a mask")
        elif idle and len(loop.idle) > 3:  # nothing is in flight, and nobody else can run
            loop.scheduler.release("a")
        return loop.scheduler.has_requests

    loop.run(depth, admit)
    assert loop.results() == {"a": truth(request)}
    assert loop.idle[3:-1].count(True) == 1
    assert loop.scheduler.holds.counts["a mask"] >= 1
