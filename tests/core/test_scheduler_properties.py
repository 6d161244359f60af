"""Tokens depend on the prompt alone; rows and blocks are conserved after every step; everybody ends.

`drive` checks the scheduler's invariants and the plan's limits after every step, and bounds the number of turns by the
work that there is, so a deadlock or a starved request fails too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hypothesis import event, given, settings
from hypothesis import strategies as st

from fakes import VOCAB, Run, check_empty, check_logprobs, drive, make_request, truth
from gapless.core.limits import Limits, most_tokens
from gapless.core.outcome import completion_logprobs
from gapless.core.request import Request

MANY = settings(max_examples=4 * settings().max_examples)  # an example takes milliseconds


@dataclass(frozen=True)
class Ask:
    """A request, as the strategy draws it."""

    turn: int
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    streams: bool
    abort_turn: int | None
    logprobs: int | None
    prompt_logprobs: int | None


@dataclass(frozen=True)
class Workload:
    limits: Limits
    asks: tuple[Ask, ...]
    depth: int

    def requests(self) -> list[Request]:
        return [
            make_request(
                str(number),
                ask.prompt,
                self.limits,
                max_tokens=ask.max_tokens,
                min_tokens=ask.min_tokens,
                stop_token_ids=ask.stop_token_ids,
                streams=ask.streams,
                logprobs=ask.logprobs,
                prompt_logprobs=ask.prompt_logprobs,
            )
            for number, ask in enumerate(self.asks)
        ]

    def run(self, requests: list[Request], failures: Collection[int] = ()) -> Run:
        arrivals: dict[int, list[Request]] = {}
        aborts: dict[int, list[str]] = {}
        for number, ask in enumerate(self.asks):
            arrivals.setdefault(ask.turn, []).append(requests[number])
            if ask.abort_turn is not None:
                aborts.setdefault(ask.abort_turn, []).append(str(number))
        return drive(self.limits, arrivals, depth=self.depth, aborts=aborts, failures=failures)


@st.composite
def limits_strategy(draw: st.DrawFn) -> Limits:
    num_rows = draw(st.integers(1, 5))
    windows = draw(st.sampled_from([(None,), (None,), (None, 3), (None, 1, 6), (None, 9, 9)]))
    return Limits(
        num_rows=num_rows,
        num_blocks=draw(st.integers(3, 16)) * len(windows),
        block_size=draw(st.sampled_from([1, 2, 3, 4])),
        max_batch_tokens=draw(st.integers(num_rows, 24)),
        max_model_len=40,
        prefix_cache=draw(st.booleans()),
        windows=windows,
    )


@st.composite
def asks(draw: st.DrawFn, limits: Limits, *, abort: bool) -> Ask:
    room = most_tokens(limits)
    shared = draw(st.integers(0, max(0, room // 2)))  # how much of a prompt that others have too
    prompt = [token % VOCAB for token in range(1, shared + 1)]
    least, most = int(shared == 0), max(int(shared == 0), min(6, room - 1 - shared))
    prompt += draw(st.lists(st.integers(0, VOCAB - 1), min_size=least, max_size=most))
    max_tokens = draw(st.integers(1, max(1, min(14, room - len(prompt)))))
    return Ask(
        turn=draw(st.integers(0, 12)),
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)) if draw(st.booleans()) else 0,
        stop_token_ids=tuple(draw(st.sets(st.integers(0, VOCAB - 1), max_size=4))),
        streams=draw(st.booleans()),
        abort_turn=draw(st.one_of(st.none(), st.integers(0, 30))) if abort else None,
        logprobs=draw(st.sampled_from([None, None, 0, 3])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0, 1, 5])),
    )


@st.composite
def workloads(draw: st.DrawFn, *, abort: bool) -> Workload:
    limits = draw(limits_strategy())
    many = draw(st.lists(asks(limits, abort=abort), min_size=2, max_size=10))
    return Workload(limits, tuple(many), draw(st.integers(1, 4)))


def note(run: Run) -> None:
    counters = run.scheduler.counters
    for name in ("num_preemptions", "num_overrun", "num_cached_tokens"):
        event(f"{name} > 0: {getattr(counters, name) > 0}")


@MANY
@given(workloads(abort=False))
def test_tokens_depend_on_the_prompt_alone(workload: Workload) -> None:
    requests = workload.requests()
    run = workload.run(requests)
    note(run)
    for request in requests:
        tokens, reason = truth(request)
        assert (run.tokens(request.id), run.finished[request.id].reason) == (tokens, reason)
        assert run.streamed.get(request.id) == (tokens if request.streams else None)
        check_logprobs(request)
    check_empty(run.scheduler)
    counters = run.scheduler.counters
    assert counters.num_prompt_tokens == sum(request.num_prompt for request in requests)
    assert counters.num_cached_tokens == sum(request.num_cached for request in requests)
    assert counters.num_generated == sum(len(run.tokens(request.id)) for request in requests)
    assert counters.num_preemptions == sum(request.num_preemptions for request in requests)
    sampled = sum(plan.num_samples for plan in run.executor.launched)
    assert sampled == counters.num_generated + counters.num_overrun
    assert max(run.executor.in_flight) <= workload.depth


@MANY
@given(workloads(abort=True))
def test_aborts_leak_nothing_and_disturb_nobody(workload: Workload) -> None:
    requests = workload.requests()
    run = workload.run(requests)
    note(run)
    for request in requests:
        tokens, reason = truth(request)
        got, ended = run.tokens(request.id), run.finished[request.id].reason
        if ended == "abort":
            assert got == tokens[: len(got)]
        else:
            assert (got, ended) == (tokens, reason)
        if request.streams:
            assert run.streamed.get(request.id, []) == got
        check_logprobs(request)
    check_empty(run.scheduler)


@MANY
@given(workloads(abort=False))
def test_only_stops_and_preemptions_overrun(workload: Workload) -> None:
    requests = workload.requests()
    run = workload.run(requests)
    stops = sum(item.reason == "stop" for item in run.finished.values())
    lost = stops + run.scheduler.counters.num_preemptions
    assert run.scheduler.counters.num_overrun <= lost * max(workload.depth - 1, 0)


@MANY
@given(workloads(abort=False), st.sets(st.integers(1, 20), max_size=3))
def test_a_failed_step_fails_those_who_were_in_it_and_nobody_else(workload: Workload, failures: set[int]) -> None:
    requests = workload.requests()
    run = workload.run(requests, failures)
    num_failed = 0
    for request in requests:
        tokens, reason = truth(request)
        got, ended = run.tokens(request.id), run.finished[request.id]
        if ended.reason == "error":
            num_failed += 1
            assert got == tokens[: len(got)]
            assert str(ended.error) in {f"step {step}" for step in failures}
        else:
            assert (got, ended.reason) == (tokens, reason)
        check_logprobs(request)
    happened = [plan for plan in run.executor.launched if plan.step in failures]
    assert num_failed <= sum(len(plan.chunks) + plan.num_decodes for plan in happened)
    check_empty(run.scheduler)


@MANY
@given(workloads(abort=False))
def test_logprobs_are_computed_once_and_streamed_with_their_tokens(workload: Workload) -> None:
    requests = workload.requests()
    run = workload.run(requests)
    event(f"preempted: {run.scheduler.counters.num_preemptions > 0}")
    for request in requests:
        found = completion_logprobs(request, len(request.scores))
        if request.streams:
            assert run.streamed_logprobs[request.id] == list(found or [None] * len(run.tokens(request.id)))
    asked = sum(request.num_prompt - 1 for request in requests if request.params.prompt_logprobs is not None)
    scored = sum(len(chunk.targets) for plan in run.executor.launched for chunk in plan.chunks)
    lost = run.scheduler.counters.num_preemptions * (workload.depth - 1) * workload.limits.max_batch_tokens
    assert asked <= scored <= asked + lost  # only what was in flight when a request gave way is computed again
