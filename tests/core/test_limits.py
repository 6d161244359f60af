"""Checks of a request against the engine's limits and the vocabulary. The engine and the server call the same ones."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import make_limits, make_request
from gapless.core.limits import all_stop_ids, check_fits, check_room, check_tokens, check_top, most_new_tokens
from gapless.core.params import MAX_STOP_IDS, SamplingParams
from gapless.errors import InvalidRequest, PromptTooLong

LIMITS = make_limits(num_blocks=5, block_size=4, max_model_len=24)
VOCAB_SIZE = 9


def fits(num_prompt: int, num_new: int) -> bool:
    with contextlib.suppress(InvalidRequest):
        check_room(num_prompt, num_new, LIMITS)
        return True
    return False


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="the prompt is empty; it needs at least one token") as caught:
        check_room(0, 1, LIMITS)
    assert caught.value.param == "prompt"


def test_the_smaller_of_context_and_cache_counts() -> None:
    assert fits(19, 1)
    assert fits(1, 19)
    with pytest.raises(PromptTooLong, match=r"length is 20 tokens.* 21 tokens .* room for 20 tokens \(5 blocks of 4\)"):
        check_room(20, 1, LIMITS)
    with pytest.raises(
        PromptTooLong, match=r"length is 24 tokens.* 25 tokens \(20 in the prompt and 5 to generate\)\.$"
    ):
        check_room(20, 5, make_limits(max_model_len=24))


@given(st.integers(1, 30), st.integers(1, 30))
def test_what_the_server_lets_in_the_engine_takes(num_prompt: int, max_tokens: int) -> None:
    """The server refuses what cannot be generated in full; the engine gives as much of it as the context has left."""
    request = make_request("a", [1] * num_prompt, LIMITS, max_tokens=max_tokens)
    assert request.limit == num_prompt + most_new_tokens(num_prompt, request.params, LIMITS)
    if fits(num_prompt, max_tokens):
        check_fits(request, LIMITS)
        assert request.limit == num_prompt + max_tokens
    elif request.limit > 20 or num_prompt >= 20:
        with pytest.raises(PromptTooLong):
            check_fits(request, LIMITS)


@pytest.mark.parametrize("wrong", [-1, VOCAB_SIZE, 10**9])
@pytest.mark.parametrize("kind", [list, lambda tokens: np.array(tokens, np.int32)], ids=["list", "array"])
def test_tokens_are_of_the_vocabulary(wrong: int, kind) -> None:
    check_tokens(kind([]), VOCAB_SIZE, "prompt")
    check_tokens(kind([0, VOCAB_SIZE - 1]), VOCAB_SIZE, "prompt")
    with pytest.raises(InvalidRequest, match=f"input: token id {wrong} at index 2 is not in the vocabulary") as caught:
        check_tokens(kind([0, 1, wrong, wrong]), VOCAB_SIZE, "input")
    assert caught.value.param == "input"


def test_as_many_likeliest_tokens_as_there_are() -> None:
    for count in (None, 0, VOCAB_SIZE):
        check_top(count, VOCAB_SIZE, "logprobs")
    with pytest.raises(InvalidRequest, match="the 10 likeliest tokens of a vocabulary of 9") as caught:
        check_top(VOCAB_SIZE + 1, VOCAB_SIZE, "logprobs")
    assert caught.value.param == "logprobs"


def test_stop_tokens_are_the_models_and_the_requests() -> None:
    asked = SamplingParams(stop_token_ids=(4, 2))
    assert all_stop_ids(asked, (2, 3), VOCAB_SIZE) == (2, 3, 4)
    assert all_stop_ids(SamplingParams(stop_token_ids=(4,), ignore_eos=True), (2, 3), VOCAB_SIZE) == (4,)
    with pytest.raises(InvalidRequest, match=f"18 stop and end-of-sequence tokens; at most {MAX_STOP_IDS}") as caught:
        all_stop_ids(asked, range(10, 10 + MAX_STOP_IDS), VOCAB_SIZE)
    assert caught.value.param == "stop_token_ids"
