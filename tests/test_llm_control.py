"""Penalties, biases, allowed and bad tokens and words through the whole engine, at any depth and when preempted."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import pytest

from gapless import LLM, SamplingParams
from gapless.cli import build_parser, sampling_values
from gapless.core.outcome import Finished, Progress
from gapless.errors import InvalidRequest
from gapless.text.bad_words import in_tokens

KINDS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": -0.5},
    "bias": {"logit_bias": {"5": 4.0, 9: -100}, "repetition_penalty": 0.8},
    "narrow": {"typical_p": 0.7, "top_n_sigma": 1.5},
    "words": {"bad_words": ["e", "th"], "bad_token_ids": [7], "frequency_penalty": 0.5},
}


def draws(llm: LLM, changes: dict[str, Any]) -> list[tuple[int, ...]]:
    """The second and the fourth are free: what their neighbours ask for must not change them."""
    values = {"max_tokens": 14, "temperature": 1.0, "ignore_eos": True}
    params = [SamplingParams(seed=seed, **values | (changes if seed % 2 == 0 else {})) for seed in range(4)]
    return [completion.token_ids for completion in llm.generate(["Hello"] * 4, params)]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_do_not_depend_on_depth_or_memory(make_llm, kind: str) -> None:
    alone = draws(make_llm(depth=1, max_num_rows=1), KINDS[kind])
    free = draws(make_llm(depth=1), {})
    assert alone[1::2] == free[1::2]
    assert alone[::2] != free[::2]
    few = make_llm(num_blocks=4, block_size=8, depth=3)
    for llm in (make_llm(depth=2), make_llm(depth=4, max_batch_tokens=5), few):
        assert draws(llm, KINDS[kind]) == alone
    assert few.stats().num_preemptions > 0


def test_a_step_without_native_calls_draws_the_same(make_llm) -> None:
    for changes in KINDS.values():
        assert draws(make_llm(native=False, dtype="float32"), changes) == draws(make_llm(dtype="float32"), changes)


def test_only_allowed_tokens_come_and_no_bad_word_does(tiny_llm: LLM) -> None:
    values = {"max_tokens": 24, "temperature": 1.5, "seed": 3, "ignore_eos": True}
    found = tiny_llm.generate("Hello", SamplingParams(**values, allowed_token_ids=[40, 41, 42]))[0]
    assert set(found.token_ids) == {40, 41, 42}
    found = tiny_llm.generate("Hello", SamplingParams(**values, allowed_token_ids=[40, 41], bad_words=[[40, 40]]))[0]
    pairs = list(zip(found.token_ids, found.token_ids[1:], strict=False))
    assert (41, 41) in pairs
    assert (40, 40) not in pairs


def test_a_strong_frequency_penalty_repeats_no_token(tiny_llm: LLM) -> None:
    """Each of these logits is the same; a count that is a token late would let one come twice in a row."""
    ids = list(range(40, 60))
    values = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True, "allowed_token_ids": ids}
    same = {"logit_bias": dict.fromkeys(ids, 100.0)}
    found = tiny_llm.generate("Hello", SamplingParams(**values, **same, frequency_penalty=2.0, presence_penalty=2.0))[0]
    assert len(set(found.token_ids)) > 15
    assert all(one != other for one, other in zip(found.token_ids, found.token_ids[1:], strict=False))


@pytest.mark.parametrize("native", [True, False])
def test_processed_log_probabilities_are_of_what_is_drawn_from(make_llm, native: bool) -> None:
    ids = list(range(40, 48))
    values = {"max_tokens": 9, "temperature": 0.7, "seed": 4, "ignore_eos": True, "allowed_token_ids": ids}
    values |= {"frequency_penalty": 1.0, "top_k": 5, "logprobs": 10}
    for depth in (1, 3):
        llm = make_llm(depth=depth, native=native, dtype="float32")
        modes = [SamplingParams(**values, logprobs_mode=mode) for mode in ("raw_logprobs", "processed_logprobs")]
        raw, processed = llm.generate(["Hello"] * 2, modes)
        assert raw.token_ids == processed.token_ids
        assert raw.logprobs is not None
        assert processed.logprobs is not None
        for one, other in zip(raw.logprobs, processed.logprobs, strict=True):
            likely = {token: logprob for token, logprob in other.top if logprob > -math.inf}
            assert len(other.top) == 10
            assert len(likely) == 5
            assert set(likely) <= set(ids)
            assert sum(map(math.exp, likely.values())) == pytest.approx(1.0, abs=1e-5)
            assert likely[other.token] == other.logprob > one.logprob


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_bias": {10**6: 1}}, "logit_bias: token id 1000000 at index 0 is not in the vocabulary"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids: token id 1000000"),
        ({"bad_token_ids": [10**6]}, "bad_token_ids: token id 1000000"),
        ({"bad_words": [[1, 10**6]]}, "bad_words: token id 1000000 at index 1"),
        ({"allowed_token_ids": [5], "bad_token_ids": [5]}, "no token is left"),
    ],
)
def test_what_the_vocabulary_does_not_have_is_refused(tiny_llm: LLM, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        tiny_llm.generate("Hello", SamplingParams(**changes))


def test_flags_have_the_same_names() -> None:
    flags = ["--logit-bias", '{"5": 2}', "--bad-word", "x", "--bad-word", "y", "--bad-token-id", "3"]
    flags += ["--allowed-token-id", "7", "--frequency-penalty", "0.5", "--typical-p", "0.9", "--top-n-sigma", "-1"]
    values = sampling_values(build_parser().parse_args(["generate", "Hi", *flags]))
    assert SamplingParams.from_dict(values) == SamplingParams(
        logit_bias={5: 2},
        bad_words=["x", "y"],
        bad_token_ids=[3],
        allowed_token_ids=[7],
        frequency_penalty=0.5,
        typical_p=0.9,
    )
    with pytest.raises(InvalidRequest, match="logit_bias must be a mapping"):
        sampling_values(build_parser().parse_args(["generate", "Hi", "--logit-bias", "5=2"]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_request_knows_what_it_had_generated(tiny_llm: LLM, kind: str) -> None:
    """As after a crash of the engine process: the first tokens come from a different engine."""
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True, **KINDS[kind])
    whole = tiny_llm.generate("Hello", params)[0]
    params = replace(params, bad_words=in_tokens(params.bad_words, tiny_llm.tokenizer))
    over, found = threading.Event(), []

    def deliver(news: Progress | Finished) -> None:
        if isinstance(news, Finished):
            found.append(news.request.tokens[news.request.num_prompt :].tolist())
            over.set()

    prompt = tiny_llm.tokenizer.encode("Hello")
    request = tiny_llm.engine.make_request(prompt, params, generated=whole.token_ids[:6])
    tiny_llm.engine.submit(request, deliver)
    assert over.wait(60)
    assert found == [list(whole.token_ids)]
