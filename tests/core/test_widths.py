"""Rows that may bring several samples a step: ragged results, promises that are taken back, and the same tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import check_empty, drive, make_limits, make_request, truth
from gapless.core.request import Request

LIMITS = make_limits(num_blocks=200, max_batch_tokens=40, max_model_len=60)


def wide(request: Request, width: int) -> Request:
    request.width = width
    return request


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_several_samples_a_step_give_the_same_tokens_in_fewer_steps(depth: int) -> None:
    def requests(width: int) -> list[Request]:
        sizes = [(3, 20), (1, 11), (9, 16)]
        return [
            wide(make_request(str(i), range(1, n + 1), LIMITS, max_tokens=count), width)
            for i, (n, count) in enumerate(sizes)
        ]

    narrow, several = drive(LIMITS, {0: requests(1)}, depth=depth), drive(LIMITS, {0: requests(4)}, depth=depth)
    for request in requests(1):
        assert (several.tokens(request.id), several.finished[request.id].reason) == truth(request)
    assert several.scheduler.counters.num_steps < 0.8 * narrow.scheduler.counters.num_steps
    assert any(len(plan.decode_widths) for plan in several.executor.launched)
    check_empty(several.scheduler)


def test_a_stop_among_the_samples_ends_the_request_where_it_stands() -> None:
    tokens, _ = truth(make_request("probe", [5, 6], LIMITS, max_tokens=12))
    stop = next(token for index, token in enumerate(tokens) if index >= 3 and token not in tokens[:index])
    request = wide(make_request("a", [5, 6], LIMITS, max_tokens=12, stop_token_ids=[stop]), 5)
    run = drive(LIMITS, {0: [request]}, depth=2)
    assert (run.tokens("a"), run.finished["a"].reason) == (tokens[: tokens.index(stop) + 1], "stop")
    check_empty(run.scheduler)


def test_widths_end_at_the_limit_and_at_the_step() -> None:
    limits = make_limits(num_blocks=200, max_batch_tokens=8, max_model_len=60)
    requests = [wide(make_request(str(i), [1 + i], limits, max_tokens=9), 6) for i in range(4)]
    run = drive(limits, {0: requests}, depth=1)
    assert max(plan.num_tokens for plan in run.executor.launched) <= 8
    for request in requests:
        assert run.tokens(request.id) == truth(request)[0]


def test_nobody_gives_way_for_a_draft() -> None:
    limits = make_limits(num_blocks=6, block_size=2, max_batch_tokens=16, max_model_len=12)
    requests = [wide(make_request(str(i), [1 + i, 2], limits, max_tokens=4), 4) for i in range(2)]
    run = drive(limits, {0: requests}, depth=1)
    assert run.scheduler.counters.num_preemptions == 0
    for request in requests:
        assert run.tokens(request.id) == truth(request)[0]


def test_who_wants_log_probabilities_gets_one_sample_a_step() -> None:
    request = wide(make_request("a", [1, 2], LIMITS, max_tokens=6, logprobs=1), 4)
    run = drive(LIMITS, {0: [request]}, depth=2)
    assert run.tokens("a") == truth(request)[0]
    assert len(request.scores) == 6


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 5)), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(0, 20),
    st.integers(1, 4),
    st.dictionaries(st.integers(0, 20), st.lists(st.sampled_from("0123"), max_size=1), max_size=3),
)
def test_tokens_do_not_depend_on_widths(sizes, depth: int, num_blocks: int, block_size: int, aborts) -> None:
    """With preemptions, prefix hits and aborts; with minimum lengths and stops that are met."""
    least = -(-24 // block_size)  # one request fits
    limits = make_limits(num_blocks=least + num_blocks, block_size=block_size, max_batch_tokens=9, max_model_len=24)
    requests = [
        wide(
            make_request(
                str(i),
                [1 + (i // 2 + j) % 40 for j in range(length)],
                limits,
                max_tokens=count,
                min_tokens=min(count, 2),
                stop_token_ids=[3, 7, 11, 19],
            ),
            width,
        )
        for i, (length, count, width) in enumerate(sizes)
    ]
    run = drive(limits, {0: requests}, depth=depth, aborts=aborts)
    for request in requests:
        tokens, reason = truth(request)
        if run.finished[request.id].reason == "abort":
            assert run.tokens(request.id) == tokens[: len(run.tokens(request.id))]
        else:
            assert (run.tokens(request.id), run.finished[request.id].reason) == (tokens, reason)
    check_empty(run.scheduler)
