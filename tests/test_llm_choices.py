"""Several choices of one prompt, offline: what each of them is, what they cost, and which are returned."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fakes import check_empty
from gapless import LLM, AsyncLLM, Completion, SamplingParams
from gapless.cli import main
from gapless.core.choices import candidates
from gapless.core.prefix_sharing import WORTH_A_STEP
from gapless.errors import InvalidRequest
from tiny import CPU

DRAWN = SamplingParams(max_tokens=12, temperature=1.5, seed=7, logprobs=2)


def alone(llm: LLM, prompt: str, params: SamplingParams) -> list[Completion]:
    """Each candidate as a request of its own."""
    return [llm.generate(prompt, one)[0] for one in candidates(params)]


def said(completion: Completion) -> list[tuple[str, tuple[int, ...], str]]:
    return [(choice.text, choice.token_ids, choice.finish_reason) for choice in completion.choices]


def mean(completion: Completion) -> float:
    assert completion.logprobs is not None
    return sum(item.logprob for item in completion.logprobs) / len(completion.token_ids)


def test_choices_are_the_completions_of_their_seeds(tiny_llm: LLM) -> None:
    params = replace(DRAWN, n=4)
    found, other = tiny_llm.generate(["Hello", "a"], params)
    for completion, prompt in ((found, "Hello"), (other, "a")):
        assert said(completion) == [said(item)[0] for item in alone(tiny_llm, prompt, params)]
        assert len({choice.token_ids for choice in completion.choices}) == 4
        assert completion.choices[0] is completion
    (single,) = tiny_llm.generate("Hello", DRAWN)
    assert single.choices == (single,)
    assert single.token_ids == found.token_ids


def test_choices_without_a_seed_differ(tiny_llm: LLM) -> None:
    (found,) = tiny_llm.generate("Hello", SamplingParams(max_tokens=12, temperature=1.5, n=4))
    assert len({choice.token_ids for choice in found.choices}) == 4


@pytest.mark.parametrize("num_prompt", [WORTH_A_STEP * 4 + 1, 40, 41, 100])
def test_a_long_prompt_is_computed_once_but_for_its_last_block(make_llm: Callable[..., LLM], num_prompt: int) -> None:
    """The last token's logits are needed, so at least it is computed by each choice."""
    llm, n = make_llm(block_size=4, num_blocks=256), 5
    before = llm.stats()
    llm.generate([[5] * num_prompt], SamplingParams(max_tokens=4, n=n, seed=1))
    stats = llm.stats() - before
    shared = (num_prompt - 1) // 4 * 4
    assert stats.num_prompt_tokens == n * num_prompt
    assert stats.num_cached_tokens == (n - 1) * shared


def test_best_of_returns_those_with_the_highest_mean_logprob(tiny_llm: LLM) -> None:
    params = replace(DRAWN, max_tokens=8, n=2, best_of=6)
    ranked = sorted(alone(tiny_llm, "Hello", params), key=mean, reverse=True)
    (found,) = tiny_llm.generate("Hello", params)
    assert [choice.token_ids for choice in found.choices] == [item.token_ids for item in ranked[:2]]
    assert [mean(choice) for choice in found.choices] == sorted(map(mean, found.choices), reverse=True)
    assert found.token_ids != alone(tiny_llm, "Hello", params)[0].token_ids, "the first candidate is not the best here"
    (bare,) = tiny_llm.generate("Hello", replace(params, logprobs=None))
    assert said(bare) == said(found)
    assert [choice.logprobs for choice in bare.choices] == [None, None]


def test_a_stream_says_which_choice_a_piece_is_of(tiny_llm: LLM) -> None:
    params = replace(DRAWN, n=3)
    texts = ["", "", ""]
    for delta in tiny_llm.stream("Hello", params):
        texts[delta.index] += delta.text
    (whole,) = tiny_llm.generate("Hello", params)
    assert delta.completion is not None
    assert said(delta.completion) == said(whole)
    assert texts == [choice.text for choice in whole.choices]


def test_best_of_is_not_streamed(tiny_llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="best_of above n cannot be streamed") as caught:
        tiny_llm.stream("a", SamplingParams(best_of=2))
    assert caught.value.param == "best_of"
    assert list(tiny_llm.stream("a", SamplingParams(max_tokens=1, best_of=1)))[-1].completion is not None


def test_a_stream_that_is_left_ends_all_choices(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    stream = llm.stream("Hello", SamplingParams(max_tokens=100, n=3, ignore_eos=True))
    next(stream)
    stream.close()
    deadline = time.monotonic() + 20
    while llm.engine._scheduler.has_requests:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert llm.stats().num_generated < 100, "a choice ran to its end, unread"
    llm.close()
    check_empty(llm.engine._scheduler)


def test_async_choices(tiny_dir: Path, tiny_llm: LLM) -> None:
    async def ask() -> list[Completion]:
        async with AsyncLLM(tiny_dir, **CPU, num_blocks=64) as llm:
            return list(await asyncio.gather(*(llm.generate("Hello", replace(DRAWN, n=n)) for n in (2, 3))))

    found = asyncio.run(ask())
    for n, completion in zip((2, 3), found, strict=True):
        assert said(completion) == said(tiny_llm.generate("Hello", replace(DRAWN, n=n))[0])


def test_run_lists_the_choices(tmp_path: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From flags and from the file; the choices of equal lines differ too."""
    lines = [{"prompt": "Hello"}, {"prompt": "Hello"}, {"prompt": "Hello", "n": 1}, {"prompt": "Hello", "best_of": 1}]
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--model", str(tiny_dir), "--device", "cpu", "--dtype", "float32", "--num-blocks", "64"]
    options += ["--max-tokens", "6", "--temperature", "1.5", "--n", "3"]
    assert main(["run", str(prompts), "-o", str(out), "--token-ids", *options]) == 1
    first, second, single, bad = (json.loads(line) for line in out.read_text().splitlines())
    assert [len(record["choices"]) for record in (first, second)] == [3, 3]
    assert len({str(choice["token_ids"]) for record in (first, second) for choice in record["choices"]}) == 6
    assert first["num_tokens"] == sum(len(choice["token_ids"]) for choice in first["choices"])
    assert "choices" not in single
    assert single["text"]
    assert bad["error"] == "best_of must be at least n = 3, got 1"
    capsys.readouterr()
    main(["run", str(prompts), *options])
    printed = capsys.readouterr().out
    assert all(choice["text"].strip() in printed for choice in first["choices"])


def test_generate_prints_each_choice(tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(tiny_dir), "--device", "cpu", "--dtype", "float32", "--num-blocks", "64"]
    assert main(["generate", "Hello", *options, "--max-tokens", "5", "--n", "2", "--best-of", "3"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("[1] ")
    assert "\n[2] " in printed
    assert "[3]" not in printed
