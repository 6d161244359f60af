"""Log-probabilities through the whole engine, compared with transformers' logits of the tiny model, in float32."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oracles
from gapless import LLM, AsyncLLM, Completion, SamplingParams
from gapless.cli import main
from gapless.core.outcome import TokenLogprob
from gapless.errors import InvalidRequest, StepFailed
from tiny import CPU, PROMPTS, ids, truth, write_tiny

COUNT = 12
BOTH = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True, logprobs=3, prompt_logprobs=2)
Logits = Callable[[Sequence[int]], np.ndarray]


@pytest.fixture(scope="module")
def logits_of(tiny_dir: Path) -> Logits:
    """Logits [len, vocab] of a sequence, by transformers."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()

    @cache
    def compute(tokens: tuple[int, ...]) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0].numpy()

    return lambda tokens: compute(tuple(tokens))


def check(done: Completion, params: SamplingParams, logits_of: Logits) -> None:
    """Assert that a completion has exactly what its parameters asked for, and that transformers agrees."""
    logits = logits_of([*done.prompt_token_ids, *done.token_ids])
    num_prompt = len(done.prompt_token_ids)
    if params.logprobs is None:
        assert done.logprobs is None
    else:
        assert done.logprobs is not None
        for place, (found, token) in enumerate(zip(done.logprobs, done.token_ids, strict=True), num_prompt - 1):
            oracles.check_logprob(found, token, logits[place], params.logprobs, atol=1e-4)
    if params.prompt_logprobs is None:
        assert done.prompt_logprobs is None
        return
    assert done.prompt_logprobs is not None
    assert (len(done.prompt_logprobs), done.prompt_logprobs[0]) == (num_prompt, None)
    for place in range(num_prompt - 1):
        found, token = done.prompt_logprobs[place + 1], done.prompt_token_ids[place + 1]
        oracles.check_logprob(found, token, logits[place], params.prompt_logprobs, atol=1e-4)


CONFIGS: dict[str, dict[str, Any]] = {
    "depth 1": {"depth": 1},
    "depth 2": {"depth": 2},
    "depth 3": {"depth": 3},
    "one row": {"max_num_rows": 1},
    "chunks of 5": {"max_batch_tokens": 5},
    "chunks of 16": {"max_batch_tokens": 16, "depth": 3},
    "blocks of 3": {"block_size": 3, "num_blocks": 300},
    "no prefix cache": {"prefix_cache": False},
    "few blocks": {"num_blocks": 9, "depth": 1},
    "few blocks, depth 3": {"num_blocks": 9, "depth": 3},
    "interleaved": {"interleave": 4, "depth": 3},
    "interleaved and few blocks": {"interleave": 9, "num_blocks": 9, "depth": 3, "max_batch_tokens": 8},
}


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS.keys())
def test_equal_to_transformers_whatever_the_options(
    make_llm, tiny_dir: Path, logits_of: Logits, options: dict[str, Any]
) -> None:
    llm = make_llm(**options)
    for _ in range(2):  # the second time with a warm prefix cache
        for prompt, done in zip(PROMPTS, llm.generate(PROMPTS, BOTH), strict=True):
            assert done.token_ids == truth(tiny_dir, prompt, COUNT).tokens
            check(done, BOTH, logits_of)
    if options.get("num_blocks") == 9:
        assert llm.stats().num_preemptions > 0


def test_each_request_gets_what_it_asked_for(tiny_llm: LLM, logits_of: Logits) -> None:
    asked = [(None, None), (0, None), (None, 0), (20, 1), (0, 20), (5, None), (None, None), (None, 7), (1, 1)]
    params = [
        SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=own, prompt_logprobs=prompt)
        for own, prompt in asked
    ]
    for given, done in zip(params, tiny_llm.generate(PROMPTS, params), strict=True):
        check(done, given, logits_of)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.7, "seed": 3},
        {"temperature": 2.5, "top_k": 4, "top_p": 0.8, "seed": 4},
        {"temperature": 1.0, "min_p": 0.1, "seed": 5},
        {"temperature": 0.0, "min_tokens": 10, "stop_token_ids": tuple(range(40, 56))},
    ],
    ids=["temperature", "top-k and top-p", "min-p", "min_tokens"],
)
def test_values_are_those_before_temperature_and_filters(tiny_llm: LLM, logits_of: Logits, values: dict) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=4, prompt_logprobs=0, **values)
    for done in tiny_llm.generate(PROMPTS, params):
        assert len(done.token_ids) == 10
        check(done, params, logits_of)


def test_a_prompt_that_is_scored_is_not_taken_from_the_prefix_cache(make_llm, logits_of: Logits) -> None:
    """Cached positions have no logits. Others still find what such a request computed."""
    llm = make_llm(block_size=4)
    plain = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=1)
    (first,) = llm.generate(PROMPTS[2], BOTH)
    (second,) = llm.generate(PROMPTS[2], BOTH)
    (third,) = llm.generate(PROMPTS[2], plain)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    assert third.num_cached_tokens >= len(PROMPTS[2]) - 4
    check(second, BOTH, logits_of)
    check(third, plain, logits_of)


def test_a_prompt_of_one_token_has_nothing_to_score(tiny_llm: LLM) -> None:
    (done,) = tiny_llm.generate([[7]], BOTH)
    assert done.prompt_logprobs == (None,)


def test_streams_carry_them_with_their_tokens(tiny_llm: LLM, logits_of: Logits) -> None:
    deltas = list(tiny_llm.stream(PROMPTS[0], BOTH))
    done = deltas[-1].completion
    assert done is not None
    check(done, BOTH, logits_of)
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    assert tuple(item for delta in deltas for item in delta.logprobs) == done.logprobs
    assert sum(len(delta.logprobs) == 1 for delta in deltas) >= COUNT - 1


def test_streams_without_them_carry_none(tiny_llm: LLM) -> None:
    deltas = list(tiny_llm.stream(PROMPTS[0], SamplingParams(max_tokens=3, temperature=0)))
    assert all(delta.logprobs == () for delta in deltas)
    assert (deltas[-1].completion.logprobs, deltas[-1].completion.prompt_logprobs) == (None, None)


def test_async_streams_too(tiny_dir: Path, logits_of: Logits) -> None:
    async def run() -> tuple[list[TokenLogprob], Completion]:
        async with AsyncLLM(tiny_dir, **CPU, depth=2, num_blocks=64) as llm:
            deltas = [delta async for delta in llm.stream(PROMPTS[0], BOTH)]
            return [item for delta in deltas for item in delta.logprobs], deltas[-1].completion

    streamed, done = asyncio.run(run())
    check(done, BOTH, logits_of)
    assert tuple(streamed) == done.logprobs


def test_a_stop_string_cuts_them_with_the_tokens(tiny_llm: LLM, tiny_dir: Path, logits_of: Logits) -> None:
    (whole,) = tiny_llm.generate(PROMPTS[0], BOTH)
    stop = whole.text[3]
    params = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True, logprobs=3, stop=(stop,))
    (done,) = tiny_llm.generate(PROMPTS[0], params)
    assert done.stop == stop
    assert len(done.token_ids) < COUNT
    check(done, params, logits_of)


def test_the_end_token_has_one_too(tiny_dir: Path, tiny_llm: LLM, logits_of: Logits) -> None:
    last = truth(tiny_dir, PROMPTS[0]).tokens[2]
    params = SamplingParams(max_tokens=COUNT, temperature=0, stop_token_ids=(last,), logprobs=0)
    (done,) = tiny_llm.generate(PROMPTS[0], params)
    assert (done.finish_reason, done.token_ids[-1]) == ("stop", last)
    check(done, params, logits_of)


def test_what_is_aborted_keeps_what_it_had(make_llm, logits_of: Logits) -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    job = llm.prepare(PROMPTS[0], params)
    for _, done in llm.run(_abort_soon(llm, job)):
        assert done.finish_reason == "abort"
        assert len(done.logprobs or ()) == len(done.token_ids)
        assert len(done.prompt_logprobs or ()) == len(done.prompt_token_ids)


def _abort_soon(llm: LLM, job: Any) -> Any:
    yield 0, job
    llm.engine.abort(job.requests[0].id)


def test_a_failed_step_leaves_the_others_right(make_llm, monkeypatch: pytest.MonkeyPatch, logits_of: Logits) -> None:
    llm = make_llm(max_num_rows=3, max_batch_tokens=16)
    runner = llm.engine._parts.built.runner
    step, counted = runner.step, iter(range(10**6))

    def failing(*args: Any) -> None:
        if next(counted) == 9:
            raise StepFailed("no")
        step(*args)

    monkeypatch.setattr(runner, "step", failing)
    found = llm.generate(PROMPTS, BOTH)
    errors = [done for done in found if done.finish_reason == "error"]
    assert 1 <= len(errors) <= 3
    for done in found:
        assert len(done.logprobs or ()) == len(done.token_ids)
        assert len(done.prompt_logprobs or ()) == len(done.prompt_token_ids)
        if done not in errors:
            check(done, BOTH, logits_of)


def test_more_than_the_vocabulary_has_is_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path, vocab_size=8)
    with LLM(tmp_path, **CPU, num_blocks=8) as llm:
        (done,) = llm.generate([[1, 2]], SamplingParams(max_tokens=1, logprobs=8, prompt_logprobs=8))
        assert sorted(token for token, _ in done.logprobs[0].top) == list(range(8))
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(InvalidRequest, match="the 9 likeliest tokens of a vocabulary of 8"):
                llm.generate([[1, 2]], SamplingParams(max_tokens=1, **{name: 9}))


def test_run_writes_them(tiny_dir: Path, tmp_path: Path, logits_of: Logits) -> None:
    lines = [
        {"prompt": PROMPTS[0], "logprobs": 2, "prompt_logprobs": 0},
        {"prompt": PROMPTS[1]},
        {"prompt": PROMPTS[3], "logprobs": None, "prompt_logprobs": 1},
        {"prompt": PROMPTS[4], "logprobs": 21},
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(line) for line in lines))
    flags = ["--device", "cpu", "--dtype", "float32", "--num-blocks", "64", "--max-tokens", "4", "--temperature", "0"]
    assert main(["run", str(source), "-o", str(out), "--model", str(tiny_dir), "--token-ids", *flags]) == 1
    first, second, third, fourth = (json.loads(line) for line in out.read_text().splitlines())
    done = Completion(
        text=first["text"],
        token_ids=tuple(first["token_ids"]),
        finish_reason=first["finish_reason"],
        prompt_token_ids=tuple(ids(PROMPTS[0])),
        logprobs=tuple(_from_record(item) for item in first["logprobs"]),
        prompt_logprobs=(None, *(_from_record(item) for item in first["prompt_logprobs"][1:])),
    )
    assert first["prompt_logprobs"][0] is None
    check(done, SamplingParams(logprobs=2, prompt_logprobs=0), logits_of)
    assert not {"logprobs", "prompt_logprobs"} & set(second)
    assert ("logprobs" in third, len(third["prompt_logprobs"])) == (False, len(PROMPTS[3]))
    assert "logprobs must be between 0 and 20, got 21" in fourth["error"]


def _from_record(record: dict[str, Any]) -> TokenLogprob:
    return TokenLogprob(**record | {"top": tuple(tuple(pair) for pair in record["top"])})
