"""What runs next, step by step, against a device of arrays whose tokens tell where they came from."""

from __future__ import annotations

from collections import deque

import pytest

from fakes import FakeExecutor, Run, check_empty, check_logprobs, drive, make_limits, make_request, truth, turn
from gapless.core.limits import Limits
from gapless.core.outcome import Finished
from gapless.core.request import Request
from gapless.core.row_fields import need
from gapless.core.scheduler import Scheduler
from gapless.errors import InvalidRequest, PromptTooLong
from gapless.pipeline.executor import Ticket

LIMITS = make_limits()


def start(limits: Limits, *requests: Request) -> Run:
    run = Run(Scheduler(limits), FakeExecutor(limits))
    for request in requests:
        run.scheduler.add(request)
    return run


def launch(run: Run) -> Ticket:
    plan = run.scheduler.schedule()
    assert plan is not None
    run.scheduler.check()
    return run.executor.launch(plan)


def settle(run: Run, ticket: Ticket) -> None:
    run.commit(run.scheduler.commit(ticket.plan, run.executor.collect(ticket)))
    run.scheduler.check()


def finish(run: Run, *, depth: int = 2) -> Run:
    in_flight: deque[Ticket] = deque()
    for _ in range(1000):
        if not run.scheduler.has_requests and not in_flight:
            return run
        turn(run, in_flight, depth)
    raise AssertionError("does not end")


def check_truth(run: Run, *requests: Request) -> None:
    for request in requests:
        tokens, reason = truth(request)
        assert (run.tokens(request.id), run.finished[request.id].reason) == (tokens, reason), request.id


def stop_at(prompt: list[int], index: int) -> int:
    """The token that the model gives to the prompt at this index, if it did not give it before."""
    tokens, _ = truth(make_request("probe", prompt, LIMITS, max_tokens=index + 1))
    assert tokens[index] not in tokens[:index]
    return tokens[index]


PROMPT = [5, 6, 9]  # its first tokens differ from each other, so that each can be a stop token


def test_a_later_request_may_have_more_stop_tokens() -> None:
    one = make_request("a", PROMPT, LIMITS, max_tokens=6, stop_token_ids=(stop_at(PROMPT, 3),))
    two = make_request("b", PROMPT, LIMITS, max_tokens=6, stop_token_ids=(900, 901, stop_at(PROMPT, 2)))
    run = finish(start(LIMITS, one, two))
    assert [len(run.tokens(request.id)) for request in (one, two)] == [4, 3]
    check_truth(run, one, two)


# -- chunks and admission ------------------------------------------------------------------------------------------


def test_a_long_prompt_is_cut_into_chunks() -> None:
    request = make_request("a", range(21), make_limits(max_batch_tokens=8), max_tokens=3)
    run = drive(make_limits(max_batch_tokens=8), {0: [request]})
    chunks = [chunk for plan in run.executor.launched for chunk in plan.chunks]
    found = [(chunk.start, len(chunk.tokens), chunk.samples) for chunk in chunks]
    assert found == [(0, 8, False), (8, 8, False), (16, 5, True)]
    check_truth(run, request)


def test_decodes_go_first_and_chunks_share_what_is_left() -> None:
    limits = make_limits(max_batch_tokens=8)
    first = make_request("a", [1, 2], limits, max_tokens=6)
    second, third = (make_request(id, range(n, n + 12), limits, max_tokens=1) for id, n in (("b", 1), ("c", 20)))
    run = start(limits, first)
    settle(run, launch(run))
    run.scheduler.add(second)
    run.scheduler.add(third)
    plans = [launch(run).plan for _ in range(3)]
    assert [plan.num_decodes for plan in plans] == [1, 1, 1]
    lengths = [[(chunk.start, len(chunk.tokens)) for chunk in plan.chunks] for plan in plans]
    assert lengths == [[(0, 7)], [(7, 5), (0, 2)], [(2, 7)]]


def test_admission_is_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    limits = make_limits(num_blocks=4)
    big, bigger, small = (
        make_request(id, range(count), limits, max_tokens=1) for id, count in (("a", 9), ("b", 9), ("c", 2))
    )
    run = start(limits, big, bigger, small)
    launch(run)
    assert (run.scheduler.num_running, run.scheduler.num_waiting) == (1, 2)
    assert (big.row >= 0, bigger.row, small.row) == (True, -1, -1)


def test_rows_bound_how_many_run() -> None:
    limits = make_limits(num_rows=2)
    requests = [make_request(str(i), [i + 1], limits) for i in range(3)]
    run = start(limits, *requests)
    ticket = launch(run)
    assert (run.scheduler.num_running, run.scheduler.num_waiting) == (2, 1)
    settle(run, ticket)
    check_truth(finish(run), *requests)


def test_results_come_in_the_order_of_rows_and_to_the_right_request() -> None:
    requests = [make_request(str(i), [i + 1, i + 2, i + 3], LIMITS, max_tokens=i % 3 + 2) for i in range(9)]
    run = drive(LIMITS, {0: requests[:5], 3: requests[5:]}, depth=2)
    check_truth(run, *requests)
    check_empty(run.scheduler)


def test_streaming_requests_get_each_token_and_others_get_none() -> None:
    loud = make_request("loud", [1, 2, 3], LIMITS, streams=True)
    quiet = make_request("quiet", [1, 2, 4], LIMITS)
    run = drive(LIMITS, {0: [loud, quiet]}, depth=2)
    assert run.streamed == {"loud": truth(loud)[0]}


# -- the ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_max_tokens_never_overruns(depth: int) -> None:
    requests = [make_request(str(i), [i + 1] * 3, LIMITS, max_tokens=i + 1) for i in range(6)]
    run = drive(LIMITS, {0: requests}, depth=depth)
    check_truth(run, *requests)
    assert run.scheduler.counters.num_overrun == 0
    assert sum(plan.num_samples for plan in run.executor.launched) == run.scheduler.counters.num_generated


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_late_stop_overruns_by_what_was_in_flight(depth: int) -> None:
    request = make_request("a", PROMPT, LIMITS, max_tokens=20, stop_token_ids=[stop_at(PROMPT, 4)])
    run = drive(LIMITS, {0: [request]}, depth=depth)
    check_truth(run, request)
    assert (len(run.tokens("a")), run.finished["a"].reason) == (5, "stop")
    assert run.scheduler.counters.num_overrun == depth - 1
    assert run.scheduler.counters.num_generated == 5
    check_empty(run.scheduler)


def test_min_tokens_holds_a_stop_back() -> None:
    prompt = PROMPT
    stops = [stop_at(prompt, 0), stop_at(prompt, 2)]
    early = make_request("early", prompt, LIMITS, max_tokens=6, stop_token_ids=stops)
    held = make_request("held", prompt, LIMITS, max_tokens=6, min_tokens=1, stop_token_ids=stops)
    edge = make_request("edge", prompt, LIMITS, max_tokens=6, min_tokens=2, stop_token_ids=stops)
    never = make_request("never", prompt, LIMITS, max_tokens=6, min_tokens=6, stop_token_ids=stops)
    run = drive(LIMITS, {0: [early, held, edge, never]}, depth=2)
    assert [len(run.tokens(id)) for id in ("early", "held", "edge", "never")] == [1, 3, 3, 6]
    assert [run.finished[id].reason for id in ("early", "held", "edge", "never")] == ["stop"] * 3 + ["length"]


def test_the_plan_says_when_a_stop_is_forbidden() -> None:
    request = make_request("a", [1, 2], LIMITS, max_tokens=4, min_tokens=2, stop_token_ids=[0])
    run = drive(LIMITS, {0: [request]}, depth=3)
    assert [plan.needs == need("min_total") for plan in run.executor.launched] == [True, True, False, False]


def test_the_plan_says_what_the_sampler_needs() -> None:
    params = {"g": {}, "r": {"temperature": 0.5}, "f": {"temperature": 0.5, "top_k": 3}, "cold": {"top_k": 3}}
    for id, values in params.items():
        run = drive(LIMITS, {0: [make_request(id, [1, 2], LIMITS, max_tokens=1, **values)]})
        plan = run.executor.launched[0]
        expected = {"r": need("temperature"), "f": need("temperature", "top_k")}.get(id, 0)
        assert plan.needs == expected, id


def test_a_prompt_of_the_longest_length_gets_one_token() -> None:
    request = make_request("a", range(LIMITS.max_model_len - 1), LIMITS, max_tokens=50)
    run = drive(LIMITS, {0: [request]}, depth=3)
    assert (len(run.tokens("a")), run.finished["a"].reason) == (1, "length")


# -- refused at the door -------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_model_is_refused_with_the_numbers() -> None:
    with pytest.raises(PromptTooLong, match=r"is 64 tokens.* 65 tokens \(64 in the prompt and 1 to generate\)\.$"):
        Scheduler(LIMITS).add(make_request("a", [1] * 64, LIMITS))


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    limits = make_limits(num_blocks=4)
    Scheduler(limits).add(make_request("a", [1] * 10, limits, max_tokens=6))
    with pytest.raises(PromptTooLong, match=r"requested 17 tokens .* room for 16 tokens \(4 blocks of 4\)"):
        Scheduler(limits).add(make_request("a", [1] * 10, limits, max_tokens=7))


def test_an_id_in_use_is_refused_and_can_be_used_again_later() -> None:
    run = start(LIMITS, make_request("a", [1, 2], LIMITS))
    with pytest.raises(InvalidRequest, match="request 'a' was submitted before; make a new one"):
        run.scheduler.add(make_request("a", [3], LIMITS))
    finish(run)
    again = make_request("a", [3], LIMITS)
    run.scheduler.add(again)
    run.finished.clear()
    check_truth(finish(run), again)


# -- preemption ----------------------------------------------------------------------------------------------------


def tight_requests(limits: Limits) -> list[Request]:
    return [make_request(id, [n, n + 1, n + 2], limits, max_tokens=13) for id, n in (("a", 1), ("b", 11), ("c", 21))]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_when_blocks_run_out_the_latest_gives_way_and_says_the_same(depth: int) -> None:
    limits = make_limits(num_blocks=6)  # two requests of 16 tokens do not fit
    requests = tight_requests(limits)
    run = drive(limits, {0: requests}, depth=depth)
    check_truth(run, *requests)
    counters = run.scheduler.counters
    assert counters.num_preemptions == sum(request.num_preemptions for request in requests) > 0
    assert counters.num_recomputed > 0
    assert requests[0].num_preemptions == 0
    assert run.order == ["a", "b", "c"]
    check_empty(run.scheduler)


def test_the_latest_arrival_gives_way_first() -> None:
    limits = make_limits(num_blocks=3)
    a, b, c = (make_request(id, [n, n + 1, n + 2], limits, max_tokens=8) for id, n in (("a", 1), ("b", 11), ("c", 21)))
    run = start(limits, a, b, c)
    settle(run, launch(run))
    settle(run, launch(run))  # each row's block is now full
    settle(run, launch(run))  # a gets c's; b, who finds nobody later than itself, pauses
    assert (a.num_preemptions, b.num_preemptions, c.num_preemptions) == (0, 0, 1)
    while a.row >= 0:
        settle(run, launch(run))
    assert (a.num_preemptions, b.num_preemptions, c.num_preemptions) == (0, 1, 1)
    assert list(run.scheduler._waiting) == ["b", "c"]
    check_truth(finish(run), a, b, c)


def test_a_sample_in_flight_of_a_preempted_request_is_dropped_and_made_again() -> None:
    limits = make_limits(num_blocks=4)
    a, b = (make_request(id, [n, n + 1, n + 2, n + 3], limits, max_tokens=9) for id, n in (("a", 1), ("b", 11)))
    run = start(limits, a, b)
    in_flight: deque[Ticket] = deque()
    while b.num_preemptions == 0:
        turn(run, in_flight, 3)
    dropped = [plan for plan in (t.plan for t in in_flight) if 1 in plan.sample_rows.tolist()]
    assert dropped, "nothing of b was in flight: the test tests nothing"
    while in_flight:
        settle(run, in_flight.popleft())
    assert run.scheduler.counters.num_overrun >= len(dropped)
    check_truth(finish(run, depth=3), a, b)


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    limits = make_limits(num_blocks=6)
    requests = tight_requests(limits)
    run = drive(limits, {0: requests}, depth=2)
    plain = drive(make_limits(num_blocks=6, prefix_cache=False), {0: tight_requests(limits)}, depth=2)
    fed, plain_fed = (sum(plan.num_tokens for plan in r.executor.launched) for r in (run, plain))
    assert fed < plain_fed
    assert [request.num_cached for request in requests] == [0, 0, 0]  # of the prompt, at first admission


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_everybody_ends_when_each_needs_the_whole_cache(depth: int) -> None:
    limits = make_limits(num_blocks=4, max_batch_tokens=4, num_rows=4)
    requests = [make_request(str(i), [i + 1] * (i % 5 + 1), limits, max_tokens=16 - (i % 5 + 1)) for i in range(8)]
    run = drive(limits, {0: requests}, depth=depth)
    check_truth(run, *requests)
    assert run.order == [str(i) for i in range(8)]


# -- rows and blocks with steps in flight --------------------------------------------------------------------------


def test_a_row_and_its_blocks_have_a_new_owner_while_the_old_ones_step_is_in_flight() -> None:
    limits = make_limits(num_rows=1, num_blocks=3, prefix_cache=False)
    stop = stop_at(PROMPT, 1)
    old = make_request("old", PROMPT, limits, max_tokens=9, stop_token_ids=[stop])
    new = make_request("new", [8, 9, 10, 11, 12], limits, max_tokens=4)
    run = start(limits, old, new)
    tickets = [launch(run) for _ in range(4)]  # samples 0..3 of old; the stop is sample 1
    settle(run, tickets[0])
    settle(run, tickets[1])
    assert run.finished["old"].reason == "stop"
    ticket = launch(run)  # new has old's row and blocks, two of old's steps are in flight
    assert ticket.plan.seat_rows[0] == tickets[3].plan.decode_rows[0]
    assert set(ticket.plan.new_blocks[:, 2].tolist()) & {b for t in tickets for b in t.plan.new_blocks[:, 2].tolist()}
    settle(run, tickets[2])
    settle(run, tickets[3])
    assert run.scheduler.counters.num_overrun == 2
    settle(run, ticket)
    check_truth(finish(run, depth=1), old, new)


def test_a_prefix_is_shared_even_before_its_step_came_back() -> None:
    prompt = list(range(1, 13))
    first, second = make_request("a", [*prompt, 20], LIMITS), make_request("b", [*prompt, 30], LIMITS)
    run = start(LIMITS, first)
    ticket = launch(run)
    run.scheduler.add(second)
    later = launch(run)
    assert (second.num_cached, [chunk.start for chunk in later.plan.chunks]) == (12, [12])
    settle(run, ticket)
    settle(run, later)
    check_truth(finish(run), first, second)


def seated(run: Run) -> list[list[int]]:
    """What each plan's chunks began with, for as long as prompts are computed."""
    return [[chunk.start for chunk in plan.chunks] for plan in run.executor.launched if plan.chunks]


def test_who_computes_the_same_as_another_in_the_same_step_waits_for_its_blocks() -> None:
    limits = make_limits(max_batch_tokens=200, max_model_len=80)
    shared = list(range(1, 41))
    requests = [make_request(id, [*shared, i], limits) for i, id in enumerate("abcd", 50)]
    run = drive(limits, {0: requests})
    check_truth(run, *requests)
    assert seated(run) == [[0], [40, 40, 40]]
    assert [request.num_cached for request in requests] == [0, 40, 40, 40]


def test_little_in_common_is_not_waited_for() -> None:
    limits = make_limits(max_batch_tokens=200, max_model_len=80)
    for length, expected in ((31, [[0, 0]]), (32, [[0], [32]])):
        requests = [make_request(id, [*range(1, length + 1), i, i], limits) for i, id in enumerate("ab", 50)]
        run = drive(limits, {0: requests})
        check_truth(run, *requests)
        assert seated(run) == expected


def test_whoever_waits_for_blocks_goes_on_when_their_maker_is_gone() -> None:
    limits = make_limits(max_batch_tokens=8, max_model_len=80)
    first, second = (make_request(id, range(1, 60), limits) for id in "ab")
    run = start(limits, first, second)
    for _ in range(3):
        settle(run, launch(run))
    assert second.row < 0
    run.scheduler.abort("a")
    check_truth(finish(run), second)
    assert second.num_cached == 24


def test_scores_of_a_prompt_do_not_come_from_another() -> None:
    limits = make_limits(max_batch_tokens=200, max_model_len=80)
    requests = [make_request(id, range(1, 60), limits, prompt_logprobs=1) for id in "ab"]
    run = drive(limits, {0: requests})
    check_truth(run, *requests)
    assert seated(run) == [[0, 0]]


def test_the_last_prompt_token_is_always_computed() -> None:
    prompt = list(range(1, 9))  # exactly two blocks
    first, second = make_request("a", prompt, LIMITS), make_request("b", prompt, LIMITS)
    run = drive(LIMITS, {0: [first], 2: [second]})
    assert second.num_cached == 4
    check_truth(run, first, second)


def test_generated_tokens_are_found_as_a_prefix_too() -> None:
    first = make_request("a", [1, 2, 3, 4, 5], LIMITS, max_tokens=8)
    run = drive(LIMITS, {0: [first]})
    second = make_request("b", first.tokens.tolist(), LIMITS, max_tokens=4)  # a conversation's next turn
    run.scheduler.add(second)
    check_truth(finish(run), second)
    assert second.num_cached == 12


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    limits = make_limits(prefix_cache=False)
    requests = [make_request(id, [1] * 9, limits) for id in "ab"]
    run = drive(limits, {0: [requests[0]], 3: [requests[1]]})
    check_truth(run, *requests)
    assert run.scheduler.counters.num_cached_tokens == 0
    assert len(run.scheduler.pool.index) == 0


def test_the_counters_count_each_prompt_once() -> None:
    limits = make_limits(num_blocks=6)
    requests = tight_requests(limits)
    counters = drive(limits, {0: requests}, depth=2).scheduler.counters
    assert counters.num_preemptions > 0
    assert counters.num_prompt_tokens == 9
    assert counters.num_generated == 39


# -- aborts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("when", range(12))
def test_abort_at_any_step_leaks_nothing_and_disturbs_nobody(depth: int, when: int) -> None:
    limits = make_limits(num_blocks=8, max_batch_tokens=6, num_rows=3)
    requests = [make_request(id, [n] * 7, limits, max_tokens=6) for id, n in (("a", 1), ("b", 1), ("c", 2), ("d", 1))]
    run = drive(limits, {0: requests}, depth=depth, aborts={when: ["b"]})
    check_truth(run, *(request for request in requests if request.id != "b"))
    tokens, _ = truth(requests[1])
    assert run.tokens("b") == tokens[: len(run.tokens("b"))]
    check_empty(run.scheduler)


def test_abort_says_how_it_ended_and_who_is_not_here() -> None:
    run = start(LIMITS, make_request("a", [1, 2], LIMITS), make_request("b", [1, 2], LIMITS))
    launch(run)
    first, second = run.scheduler.abort("a"), run.scheduler.abort("b", "stop")
    assert isinstance(first, Finished)
    assert isinstance(second, Finished)
    assert (first.reason, second.reason) == ("abort", "stop")
    assert run.scheduler.abort("a") is None
    assert run.scheduler.abort("nobody") is None
    check_empty(run.scheduler)


def test_abort_all_ends_those_who_run_and_those_who_wait() -> None:
    limits = make_limits(num_rows=1)
    run = start(limits, *(make_request(id, [1, 2], limits) for id in "abc"))
    launch(run)
    assert [item.request.id for item in run.scheduler.abort_all()] == ["a", "b", "c"]
    check_empty(run.scheduler)


# -- failed steps --------------------------------------------------------------------------------------------------


def fail(run: Run, ticket: Ticket) -> RuntimeError:
    error = RuntimeError("the device said no")
    run.executor.collect(ticket)
    run.commit(run.scheduler.fail(ticket.plan, error))
    run.scheduler.check()
    return error


def test_a_failed_step_fails_its_own_requests_and_no_others() -> None:
    limits = make_limits(num_rows=4, max_batch_tokens=4)
    a, b = (make_request(id, [n] * 4, limits, max_tokens=5) for id, n in (("a", 1), ("b", 2)))
    run = start(limits, a)
    first = launch(run)  # all of the budget: a alone
    run.scheduler.add(b)
    second = launch(run)  # a decodes, b's first 3 tokens
    settle(run, first)
    third = launch(run)
    assert {chunk.row for chunk in second.plan.chunks} == {b.row}
    error = fail(run, second)
    assert {id: item.reason for id, item in run.finished.items()} == {"a": "error", "b": "error"}
    assert all(item.error is error for item in run.finished.values())
    run.executor.collect(third)
    check_empty(run.scheduler)


def test_those_who_were_not_in_the_failed_step_go_on_with_the_right_tokens() -> None:
    limits = make_limits(num_rows=4, max_batch_tokens=4)
    a, b, c = (make_request(id, [n] * 4, limits, max_tokens=9) for id, n in (("a", 1), ("b", 1), ("c", 3)))
    run = start(limits, a)
    first = launch(run)  # a's prompt
    run.scheduler.add(b)
    run.scheduler.add(c)
    run.scheduler.abort("a")
    second = launch(run)  # b's prompt, one block of which it computes itself
    third = launch(run)  # b decodes, c's prompt begins
    settle(run, first)
    fail(run, second)
    assert set(run.finished) == {"b"}
    settle(run, third)  # what it sampled is nobody's now
    check_truth(finish(run), c)
    check_empty(run.scheduler)


def test_blocks_that_a_failed_step_left_unwritten_are_not_found() -> None:
    prompt = list(range(1, 10))
    first, second = make_request("a", prompt, LIMITS), make_request("b", prompt, LIMITS)
    run = start(LIMITS, first)
    ticket = launch(run)
    run.scheduler.add(second)
    later = launch(run)
    assert second.num_cached == 8
    fail(run, ticket)
    assert len(run.scheduler.pool.index) == 0
    settle(run, later)
    check_truth(finish(run), second)


def test_a_failed_step_whose_requests_have_left_fails_nobody() -> None:
    run = start(LIMITS, make_request("a", [1, 2], LIMITS))
    ticket = launch(run)
    run.scheduler.abort("a")
    run.scheduler.add(b := make_request("b", [3, 4], LIMITS))
    later = launch(run)
    fail(run, ticket)
    assert run.finished == {}
    settle(run, later)
    check_truth(finish(run), b)


def test_the_order_of_the_queue_survives_a_failed_step() -> None:
    limits = make_limits(num_rows=2, max_batch_tokens=4)
    requests = [make_request(id, [n] * 6, limits, max_tokens=3) for n, id in enumerate("abcd", 1)]
    run = start(limits, *requests)
    ticket = launch(run)  # 4 tokens of a
    later = launch(run)  # a's other two, two of b
    fail(run, ticket)
    assert list(run.scheduler._waiting) == ["b", "c", "d"]
    settle(run, later)
    check_truth(finish(run), *requests[1:])
    assert run.order == ["a", "b", "c", "d"]


def test_a_failed_step_does_not_count_prompts_again() -> None:
    limits = make_limits(num_rows=2, max_batch_tokens=4)
    run = start(limits, *(make_request(id, [n] * 4, limits, max_tokens=3) for n, id in enumerate("ab", 1)))
    ticket = launch(run)  # a's prompt
    later = launch(run)  # a decodes, b's prompt begins
    fail(run, ticket)
    settle(run, later)
    assert set(finish(run).finished) == {"a", "b"}
    assert run.scheduler.counters.num_prompt_tokens == 8


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_when_every_step_fails_everybody_is_told_soon(depth: int) -> None:
    limits = make_limits(num_rows=2, max_batch_tokens=6)
    requests = [make_request(id, [n] * 5, limits) for n, id in enumerate("abcde", 1)]
    run = drive(limits, {0: requests}, depth=depth, failures=range(1, 100))
    assert [run.finished[id].reason for id in "abcde"] == ["error"] * 5
    assert run.num_turns <= 5 * (depth + 1)


# -- the check itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.rows.cursor.__setitem__(0, 60),
        lambda s: s.rows.pending.__setitem__(0, 60),
        lambda s: s.rows._free.append(0),
        lambda s: s.rows._free.clear(),
        lambda s: s._prefilling.append(0),
        lambda s: s.rows.num_blocks.__setitem__(0, 1),
        lambda s: s.pool.allocate(),
        lambda s: s._waiting.move_to_end("c"),
    ],
)
def test_the_check_sees_damage(damage) -> None:
    limits = make_limits(max_batch_tokens=12)
    run = start(limits, *(make_request(id, [n] * 6, limits) for n, id in enumerate("abcd")))
    settle(run, launch(run))
    run.scheduler.check()
    damage(run.scheduler)
    with pytest.raises(AssertionError):
        run.scheduler.check()


# -- log-probabilities of prompts ----------------------------------------------------------------------------------


def starts(run: Run, request: Request) -> list[int]:
    """Where the request began each time that it was seated."""
    first = [chunk for plan in run.executor.launched for chunk in plan.chunks if chunk.row in plan.seat_rows]
    known = request.tokens.tolist()
    return [chunk.start for chunk in first if chunk.tokens.tolist() == known[chunk.start : chunk.length]]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_prompt_that_is_scored_again_after_a_preemption_goes_on_where_it_was(depth: int) -> None:
    limits = make_limits(num_rows=2, num_blocks=7, max_batch_tokens=2)
    old = make_request("old", [1] * 4, limits, max_tokens=16)
    scored = make_request("scored", range(15), limits, max_tokens=2, prompt_logprobs=2)
    run = drive(limits, {0: [old, scored]}, depth=depth)
    check_truth(run, old, scored)
    check_logprobs(scored)
    assert starts(run, scored) == [0, 8]
    assert scored.num_cached == 0
    if depth == 1:  # nothing was in flight when it gave way
        assert sum(len(chunk.targets) for plan in run.executor.launched for chunk in plan.chunks) == 14


def test_a_prompt_that_is_scored_computes_what_others_find() -> None:
    scored, again = (make_request(id, range(13), LIMITS, prompt_logprobs=0) for id in "ab")
    plain = make_request("c", range(13), LIMITS, logprobs=1)
    run = drive(LIMITS, {0: [scored], 20: [again], 40: [plain]})
    assert [request.num_cached for request in (scored, again, plain)] == [0, 0, 12]
    for request in (scored, again, plain):
        check_logprobs(request)
    assert run.scheduler.rows.num_scoring == 0
