"""The whole pipeline on the exact toy model: tokens depend on prompt, parameters and seed, and on nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import event, given, settings
from hypothesis import strategies as st

from fakes import check_empty
from gapless.core.limits import Limits
from gapless.core.request import Request
from gapless.device.checker import CheckedDevice
from gapless.device.cpu import CpuDevice
from toy import VOCAB, check_toy_logprobs, run_on, toy_request, toy_truth

MANY = settings(max_examples=2 * settings().max_examples)


@dataclass(frozen=True)
class Setup:
    limits: Limits
    depth: int
    seed: int | None  # of the interleaving; None: threads


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    num_rows = draw(st.integers(1, 4))
    limits = Limits(
        num_rows=num_rows,
        num_blocks=draw(st.integers(8, 20)),
        block_size=draw(st.sampled_from([2, 3, 4])),
        max_batch_tokens=draw(st.integers(num_rows, 16)),
        max_model_len=32,
        prefix_cache=draw(st.booleans()),
    )
    return Setup(limits, draw(st.integers(1, 4)), draw(st.one_of(st.none(), st.integers(0, 10**6))))


@st.composite
def params(draw: st.DrawFn) -> dict[str, object]:
    max_tokens = draw(st.integers(1, 9))
    return {
        "max_tokens": max_tokens,
        "min_tokens": draw(st.integers(0, max_tokens)),
        "temperature": draw(st.sampled_from([0, 0, 0.4, 1.0, 2.5])),
        "top_k": draw(st.sampled_from([0, 0, 1, 7])),
        "stop_token_ids": tuple(draw(st.sets(st.integers(0, VOCAB - 1), max_size=8))),
        "logprobs": draw(st.sampled_from([None, None, 0, 4])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 0, 3, 20])),
    }


@st.composite
def many_requests(draw: st.DrawFn, limits: Limits) -> list[Request]:
    shared = draw(st.lists(st.integers(0, VOCAB - 1), max_size=9))
    found = []
    for number in range(draw(st.integers(1, 6))):
        prompt = shared[: draw(st.integers(0, len(shared)))] + draw(st.lists(st.integers(0, VOCAB - 1), max_size=4))
        seed = draw(st.integers(-(2**63), 2**63 - 1))
        room = min(limits.max_model_len, limits.num_blocks * limits.block_size)
        request = toy_request(str(number), prompt or [1], seed=seed, limits=limits, **draw(params()))
        if request.limit <= room:
            found.append(request)
    return found


@MANY
@given(st.data())
def test_tokens_are_those_of_the_model(data: st.DataObject) -> None:
    setup = data.draw(setups())
    requests = data.draw(many_requests(setup.limits))
    if not requests:
        return
    device = CheckedDevice(CpuDevice(seed=setup.seed))
    outcome = run_on(device, requests, depth=setup.depth, limits=setup.limits)
    event(f"preempted: {outcome.scheduler.counters.num_preemptions > 0}")
    event(f"overrun: {outcome.scheduler.counters.num_overrun > 0}")
    assert outcome.tokens == {request.id: toy_truth(request) for request in requests}
    for request in requests:
        check_toy_logprobs(request)
    check_empty(outcome.scheduler)


@MANY
@given(st.data())
def test_no_setup_differs_from_another(data: st.DataObject) -> None:
    """Two setups, the second with the requests in another order: every request gets the same tokens."""
    first, second = data.draw(setups()), data.draw(setups())
    requests = data.draw(many_requests(first.limits))
    again = [
        Request(r.id, r.prompt, r.params, r.seed, r.stop_ids, r.limit)
        for r in data.draw(st.permutations(requests))
        if r.limit <= second.limits.num_blocks * second.limits.block_size
    ]
    if not again:
        return
    a = run_on(CpuDevice(seed=first.seed), requests, depth=first.depth, limits=first.limits)
    b = run_on(CpuDevice(seed=second.seed), again, depth=second.depth, limits=second.limits)
    assert b.tokens == {request.id: a.tokens[request.id] for request in again}
