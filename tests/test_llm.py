"""`LLM` as its users see it, on a tiny model whose tokens are characters."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import check_empty
from gapless import LLM, Completion, SamplingParams
from gapless.client import Job
from gapless.core.outcome import Finished, Progress
from gapless.core.request import int_array
from gapless.errors import EngineClosed, InvalidRequest, StepFailed
from gapless.text.tokenizer import Tokenizer
from tiny import ALPHABET, COUNT, CPU, EOS, MAX_LEN, PROMPTS, ids, text_of, truth

TIMEOUT_S = 20.0
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.001)


# -- the same tokens, whatever the schedule ------------------------------------------------------------------------


def test_the_tiny_models_tokens_win_clearly(tiny_dir: Path) -> None:
    """Rounding differs between batches by less than 1e-6; no prompt here is decided by so little."""
    assert min(truth(tiny_dir, prompt).margin for prompt in PROMPTS) > 1e-4
    assert len({truth(tiny_dir, prompt).tokens for prompt in PROMPTS}) == len(PROMPTS)


CONFIGS: dict[str, dict[str, Any]] = {
    "depth 1": {"depth": 1},
    "depth 2": {"depth": 2},
    "depth 3": {"depth": 3},
    "depth 8": {"depth": 8},
    "depth auto": {"depth": "auto"},
    "one row": {"max_num_rows": 1},
    "two rows": {"max_num_rows": 2, "depth": 3},
    "chunks of 5": {"max_batch_tokens": 5},
    "chunks of 16": {"max_batch_tokens": 16, "depth": 3},
    "blocks of 1": {"block_size": 1, "num_blocks": 900},
    "blocks of 7": {"block_size": 7},
    "no prefix cache": {"prefix_cache": False},
    "few blocks": {"num_blocks": 9, "depth": 3},
    "unchecked": {"check": False},
    **{f"interleaved {seed}": {"interleave": seed, "depth": 2 + seed % 2} for seed in range(4)},
    "interleaved and few blocks": {"interleave": 9, "num_blocks": 9, "depth": 3, "max_batch_tokens": 8},
}


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_tokens_are_the_models_whatever_the_options(make_llm, tiny_dir: Path, options: dict[str, Any]) -> None:
    llm = make_llm(**options)
    for _ in range(2):  # the second time with a warm prefix cache
        found = [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]
        assert found == [truth(tiny_dir, prompt).tokens for prompt in PROMPTS]
    if options.get("num_blocks") == 9:
        assert llm.stats().num_preemptions > 0


def test_order_of_prompts_does_not_matter(tiny_llm: LLM, tiny_dir: Path) -> None:
    found = tiny_llm.generate(PROMPTS[::-1], GREEDY)
    assert [completion.token_ids for completion in found] == [truth(tiny_dir, p).tokens for p in PROMPTS[::-1]]


# -- prompts, parameters, results ----------------------------------------------------------------------------------


def test_results_come_in_input_order(tiny_llm: LLM, tiny_dir: Path) -> None:
    params = [SamplingParams(max_tokens=20 - 2 * i, temperature=0, ignore_eos=True) for i in range(len(PROMPTS))]
    found = tiny_llm.generate(PROMPTS, params)
    for prompt, one, completion in zip(PROMPTS, params, found, strict=True):
        assert completion.prompt_token_ids == tuple(ids(prompt))
        assert completion.token_ids == truth(tiny_dir, prompt).tokens[: one.max_tokens]
        assert completion.finish_reason == "length"


def test_the_first_prompt_runs_while_others_are_read(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before, encode = tiny_llm.stats(), tiny_llm._client.encode

    def slow(prompt: Any) -> Any:
        if prompt == "last":
            eventually(lambda: (tiny_llm.stats() - before).num_steps > 0)
        return encode(prompt)

    monkeypatch.setattr(tiny_llm._client, "encode", slow)
    first, last = tiny_llm.generate(["first", "last"], GREEDY)
    assert (first.prompt_token_ids, last.prompt_token_ids) == (tuple(ids("first")), tuple(ids("last")))


def test_all_prompts_are_read_early_where_each_is_many_requests(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt alone gives the engine as much as it takes ahead."""
    encode, submit, num_submitted = tiny_llm._client.encode, tiny_llm.engine.submit, 0

    def count(*args: Any) -> None:
        nonlocal num_submitted
        num_submitted += 1
        submit(*args)

    def read(prompt: Any) -> Any:
        assert prompt != "last" or num_submitted == tiny_llm._num_ahead
        return encode(prompt)

    monkeypatch.setattr(tiny_llm._client, "encode", read)
    monkeypatch.setattr(tiny_llm.engine, "submit", count)
    params = SamplingParams(max_tokens=1, n=tiny_llm._num_ahead)
    assert len(tiny_llm.generate(["first", "second", "last"], params)) == 3


def test_text_and_token_ids_are_the_same_prompt(tiny_llm: LLM) -> None:
    by_text, by_list, by_tuple = tiny_llm.generate(["Hello", ids("Hello"), tuple(ids("Hello"))], GREEDY)
    assert by_text.token_ids == by_list.token_ids == by_tuple.token_ids
    assert by_text.text == by_list.text == text_of(by_text.token_ids)


def test_one_prompt_needs_no_list(tiny_llm: LLM) -> None:
    assert len(tiny_llm.generate("Hello", GREEDY)) == len(tiny_llm.generate(ids("Hello"), GREEDY)) == 1


def test_without_parameters_the_defaults_count(tiny_llm: LLM) -> None:
    (found,) = tiny_llm.generate("Hello")
    assert len(found.token_ids) <= MAX_LEN - 5
    assert found.finish_reason in ("length", "stop")


def test_the_models_length_ends_a_completion(tiny_llm: LLM, tiny_dir: Path) -> None:
    (found,) = tiny_llm.generate("x" * 120, LONG)
    assert (len(found.token_ids), found.finish_reason) == (8, "length")
    assert found.token_ids == truth(tiny_dir, "x" * 120, 8).tokens


def test_the_end_token_ends_a_completion_unless_ignored(tiny_llm: LLM, tiny_dir: Path) -> None:
    tokens = truth(tiny_dir, "Hello, world").tokens
    end = tokens.index(EOS)  # this prompt leads to it
    (stopped,) = tiny_llm.generate("Hello, world", SamplingParams(max_tokens=COUNT, temperature=0))
    (ignored,) = tiny_llm.generate("Hello, world", GREEDY)
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop) == (tokens[: end + 1], "stop", None)
    assert stopped.text == text_of(tokens[:end])
    assert (ignored.token_ids, ignored.finish_reason) == (tokens, "length")


def test_stop_tokens(tiny_llm: LLM, tiny_dir: Path) -> None:
    tokens = truth(tiny_dir, "a").tokens
    stops = (tokens[7], tokens[4])
    first = min(tokens.index(stop) for stop in stops)
    (found,) = tiny_llm.generate("a", SamplingParams(max_tokens=20, temperature=0, stop_token_ids=stops))
    assert (found.token_ids, found.finish_reason) == (tokens[: first + 1], "stop")


def test_min_tokens_keeps_stop_tokens_away(tiny_llm: LLM, tiny_dir: Path) -> None:
    stop = truth(tiny_dir, "a").tokens[0]
    values = {"max_tokens": 20, "temperature": 0, "stop_token_ids": (stop,), "ignore_eos": True}
    (at_once,) = tiny_llm.generate("a", SamplingParams(**values))
    (held,) = tiny_llm.generate("a", SamplingParams(**values, min_tokens=6))
    assert at_once.token_ids == (stop,)
    assert len(held.token_ids) > 6
    assert stop not in held.token_ids[:6]


def test_min_tokens_keeps_stop_strings_away(tiny_llm: LLM, tiny_dir: Path) -> None:
    tokens = truth(tiny_dir, "a").tokens
    text = "".join(ALPHABET[token] for token in tokens)
    for least in range(len(tokens) + 1):
        stop = text[2:4]  # two tokens
        later = text.find(stop, max(least - 1, 0))  # the first that ends past the first `least` tokens
        values = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "stop": stop, "min_tokens": least}
        (found,) = tiny_llm.generate("a", SamplingParams(**values))
        assert found.text == text_of(tokens if later < 0 else tokens[:later]), least
        assert found.finish_reason == ("length" if later < 0 else "stop")


def test_the_stop_stays_in_the_text_if_asked_for(tiny_llm: LLM, tiny_dir: Path) -> None:
    tokens = truth(tiny_dir, "a").tokens
    end = tokens.index(tokens[5]) + 1
    text = text_of(tokens[:end])
    common = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    for stop in ({"stop": text[-1]}, {"stop_token_ids": (tokens[5],)}):
        for include in (False, True):
            params = SamplingParams(**common, **stop, include_stop_str_in_output=include)
            (found,) = tiny_llm.generate("a", params)
            streamed = "".join(delta.text for delta in tiny_llm.stream("a", params))
            assert found.text == streamed == (text if include else text[:-1])
            assert (found.token_ids, found.finish_reason) == (tokens[:end], "stop")


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_a_top_p_of_zero_is_greedy(make_llm, native: bool) -> None:
    llm = make_llm(native=native)
    greedy, zero, both, _ = llm.generate(
        ["Hello"] * 4,
        [
            SamplingParams(max_tokens=16, temperature=0, ignore_eos=True),
            SamplingParams(max_tokens=16, temperature=3.0, top_p=0, ignore_eos=True),
            SamplingParams(max_tokens=16, temperature=3.0, top_p=0, top_k=9, seed=4, ignore_eos=True),
            SamplingParams(max_tokens=16, temperature=3.0, top_p=0.9, ignore_eos=True),  # the step draws and filters
        ],
    )
    assert greedy.token_ids == zero.token_ids == both.token_ids


def test_min_tokens_keep_stop_strings_away(tiny_llm: LLM) -> None:
    """As a whole and as a stream; the stop string counts again when it comes after them."""
    values: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    (whole,) = tiny_llm.generate("a", SamplingParams(**values))
    stop = whole.text[3]
    for min_tokens in (0, 3, 4, 10, 60):
        at = whole.text.find(stop, min_tokens)
        text = whole.text if at < 0 else whole.text[:at]
        params = SamplingParams(**values, stop=stop, min_tokens=min_tokens)
        assert tiny_llm.generate("a", params)[0].text == text, min_tokens
        assert "".join(delta.text for delta in tiny_llm.stream("a", params)) == text


def test_stop_strings(tiny_llm: LLM, tiny_dir: Path) -> None:
    text = text_of(truth(tiny_dir, "0123456789").tokens)
    stop = text[4:7]  # three tokens
    cut = text.index(stop)
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True, stop=["never there", stop])
    before = tiny_llm.stats()
    (found,) = tiny_llm.generate("0123456789", params)
    assert (found.text, found.finish_reason, found.stop) == (text[:cut], "stop", stop)
    assert text_of(found.token_ids) == text[: cut + len(stop)]
    eventually(lambda: not tiny_llm.engine._scheduler.has_requests)
    assert (tiny_llm.stats() - before).num_generated < 100


def test_a_stop_string_that_is_not_found_changes_nothing(tiny_llm: LLM, tiny_dir: Path) -> None:
    tokens = truth(tiny_dir, "a").tokens
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, stop=text_of(tokens)[-1] + "\x07")
    (found,) = tiny_llm.generate("a", params)
    assert (found.text, found.finish_reason, found.stop) == (text_of(tokens), "length", None)


def test_the_prefix_cache_shows_in_the_completion(make_llm) -> None:
    llm = make_llm()
    prompt = PROMPTS[2]
    cold, warm = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, len(prompt) // 16 * 16)
    assert cold.token_ids == warm.token_ids
    assert make_llm(prefix_cache=False).generate([prompt, prompt], GREEDY)[1].num_cached_tokens == 0


# -- seeds ---------------------------------------------------------------------------------------------------------


def draws(llm: LLM, seeds: list[int | None], **changes: Any) -> list[tuple[int, ...]]:
    values = {"max_tokens": 16, "temperature": 1.2, "ignore_eos": True} | changes
    found = llm.generate(["Hello"] * len(seeds), [SamplingParams(seed=seed, **values) for seed in seeds])
    return [completion.token_ids for completion in found]


@pytest.mark.parametrize("changes", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05, "top_k": 20}], ids=str)
def test_a_seed_gives_the_same_tokens_at_any_depth_and_in_any_company(make_llm, changes: dict[str, Any]) -> None:
    alone = [draws(make_llm(depth=1), [seed], **changes)[0] for seed in (1, 2, 3)]
    assert len(set(alone)) == 3
    for options in ({"depth": 2}, {"depth": 3, "max_batch_tokens": 4}, {"depth": 2, "interleave": 5}):
        together = draws(make_llm(**options), [9, 1, 8, 2, 7, 3], **changes)
        assert [together[1], together[3], together[5]] == alone


def test_without_a_seed_the_engines_seed_decides(make_llm) -> None:
    first, same, other = (draws(make_llm(seed=seed), [None] * 4) for seed in (5, 5, 6))
    assert first == same
    assert len({*first, *other}) == 8  # neither requests nor engines repeat each other


def test_a_preempted_request_draws_the_same(make_llm) -> None:
    plenty, few = make_llm(num_blocks=64), make_llm(num_blocks=4, block_size=8, depth=3)
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(4)]
    a, b = (llm.generate(["Hello"] * 4, params) for llm in (plenty, few))
    assert [completion.token_ids for completion in a] == [completion.token_ids for completion in b]
    assert few.stats().num_preemptions > 0


# -- streams -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(max_tokens=30, temperature=0.9, seed=4),
        SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, stop=["o", "zz"]),
        SamplingParams(max_tokens=1, temperature=0),
    ],
    ids=["greedy", "seeded", "stop", "one token"],
)
def test_deltas_add_up(tiny_llm: LLM, params: SamplingParams) -> None:
    for prompt in PROMPTS[:4]:
        deltas = list(tiny_llm.stream(prompt, params))
        (whole,) = tiny_llm.generate(prompt, params)
        assert [delta.completion is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        end = deltas[-1].completion
        assert isinstance(end, Completion)
        assert (end.text, end.token_ids, end.finish_reason, end.stop) == (
            (whole.text, whole.token_ids, whole.finish_reason, whole.stop)
        )
        assert "".join(delta.text for delta in deltas) == end.text
        streamed = tuple(token for delta in deltas for token in delta.token_ids)
        assert streamed == end.token_ids


def test_token_ids_of_deltas_add_up_when_a_stop_string_ends_the_text(tiny_llm: LLM, tiny_dir: Path) -> None:
    """Fed by hand, so that tokens surely come between the stop string and the end of the request."""
    tokens = truth(tiny_dir, "a").tokens[:8]
    job = tiny_llm.prepare("a", SamplingParams(max_tokens=20, temperature=0, stop=text_of(tokens)[2:4]))
    deltas = [job.take(Progress(job.requests[0], token)) for token in tokens]
    job.requests[0].tokens = int_array([*ids("a"), *tokens])
    deltas.append(job.take(Finished(job.requests[0], "stop")))
    streamed = tuple(token for delta in deltas for token in delta.token_ids)
    assert streamed == deltas[-1].completion.token_ids


def test_tokens_come_one_by_one(tiny_llm: LLM) -> None:
    deltas = list(tiny_llm.stream("Hello", GREEDY))
    assert [len(delta.token_ids) for delta in deltas] == [1] * COUNT + [0]


def test_closing_a_stream_frees_its_row_and_blocks(make_llm) -> None:
    llm = make_llm()
    stream = llm.stream("Hello", LONG)
    next(stream)
    assert llm.engine._scheduler.num_running == 1
    stream.close()
    eventually(lambda: not llm.engine._scheduler.has_requests)
    assert llm.stats().num_generated < LONG.max_tokens, "it ran to its end, unread"
    llm.close()
    check_empty(llm.engine._scheduler)


def test_streams_of_one_caller_interleave(tiny_llm: LLM, tiny_dir: Path) -> None:
    streams = [tiny_llm.stream(prompt, GREEDY) for prompt in PROMPTS[:3]]
    tokens: list[list[int]] = [[], [], []]
    for deltas in zip(*streams, strict=True):
        for found, delta in zip(tokens, deltas, strict=True):
            found += delta.token_ids
    assert [tuple(found) for found in tokens] == [truth(tiny_dir, prompt).tokens for prompt in PROMPTS[:3]]


# -- chat ----------------------------------------------------------------------------------------------------------


def test_chat_is_the_template_filled_in(tiny_llm: LLM) -> None:
    talk = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    filled = "system: be|user: hi|assistant:"
    answer = tiny_llm.chat(talk, GREEDY)
    assert answer.prompt_token_ids == tuple(ids(filled))
    assert answer.token_ids == tiny_llm.generate(filled, GREEDY)[0].token_ids
    assert [delta.completion for delta in tiny_llm.stream_chat(talk, GREEDY)][-1].text == answer.text


def test_many_chats_are_answered_in_order(tiny_llm: LLM) -> None:
    talks = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    alone = [tiny_llm.chat(talk, GREEDY).token_ids for talk in talks]
    assert [answer.token_ids for answer in tiny_llm.chat(talks, GREEDY)] == alone


def test_the_text_of_a_chat_has_no_end_token(tiny_llm: LLM, make_llm: Callable[..., LLM]) -> None:
    """The tiny model's end token is a line's end, which it can write in no other way."""
    talk = [{"role": "user", "content": "a\nb"}]
    assert EOS not in tiny_llm.chat(talk, GREEDY).prompt_token_ids
    assert EOS in tiny_llm.generate("a\nb", GREEDY)[0].prompt_token_ids
    assert EOS in make_llm(allow_special_tokens=True).chat(talk, GREEDY).prompt_token_ids


def test_the_template_process_ends_with_the_llm(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    chat = llm._client._chat
    assert chat is not None
    assert chat._process.pid is None, "nobody asked for a chat yet"
    llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    pid = chat._process.pid
    assert pid is not None
    llm.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_prompt_that_cannot_fit_is_not_tokenized(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
    with pytest.raises(InvalidRequest, match="maximum context length is 128 tokens"):
        tiny_llm.generate("x" * 10**7)
    with pytest.raises(InvalidRequest, match="maximum context length is 128 tokens"):
        tiny_llm.chat([{"role": "user", "content": "x" * 10**7}])


# -- run -----------------------------------------------------------------------------------------------------------


def test_run_gives_results_as_they_finish_and_takes_jobs_as_they_come(tiny_llm: LLM) -> None:
    taken: list[int] = []

    def jobs() -> Iterator[tuple[int, Job]]:
        for number in range(2000):
            taken.append(number)
            yield number, tiny_llm.prepare("ab", SamplingParams(max_tokens=1 + number % 3, temperature=0))

    results = tiny_llm.run(jobs())
    next(results)
    assert len(taken) < 2000
    results.close()
    eventually(lambda: not tiny_llm.engine._scheduler.has_requests)


def test_run_numbers_its_results(tiny_llm: LLM, tiny_dir: Path) -> None:
    jobs = [(10 * i, tiny_llm.prepare(prompt, GREEDY)) for i, prompt in enumerate(PROMPTS)]
    found = dict(tiny_llm.run(jobs))
    assert {number: item.token_ids for number, item in found.items()} == {
        10 * i: truth(tiny_dir, prompt).tokens for i, prompt in enumerate(PROMPTS)
    }


def test_an_interruption_ends_what_runs_and_the_engine_goes_on(tiny_llm: LLM, tiny_dir: Path) -> None:
    jobs = [(0, tiny_llm.prepare("a", SamplingParams(max_tokens=1)))]
    jobs += [(i, tiny_llm.prepare([i] * 4, LONG)) for i in range(1, 9)]

    def interrupted() -> None:
        for _ in tiny_llm.run(jobs):
            raise KeyboardInterrupt

    before = tiny_llm.stats()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    eventually(lambda: not tiny_llm.engine._scheduler.has_requests)
    assert (tiny_llm.stats() - before).num_generated < 8 * LONG.max_tokens, "they ran to their end, unread"
    assert tiny_llm.generate("a", GREEDY)[0].token_ids == truth(tiny_dir, "a").tokens


def test_a_job_runs_once(make_llm, tiny_dir: Path) -> None:
    llm = make_llm()
    job = llm.prepare("a", GREEDY)
    assert dict(llm.run([(0, job)]))[0].token_ids == truth(tiny_dir, "a").tokens
    again = dict(llm.run([(0, job)]))[0]
    assert (again.finish_reason, "was submitted before; make a new one" in again.error) == ("error", True)
    assert llm.generate("a", GREEDY)[0].token_ids == truth(tiny_dir, "a").tokens


# -- many callers, and the end -------------------------------------------------------------------------------------


def test_two_threads_generate_at_once(tiny_llm: LLM, tiny_dir: Path) -> None:
    found: dict[int, list[tuple[int, ...]]] = {}

    def work(number: int) -> None:
        prompts = PROMPTS[number:] + PROMPTS[:number]
        found[number] = [completion.token_ids for completion in tiny_llm.generate(prompts, GREEDY)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    for number in range(3):
        prompts = PROMPTS[number:] + PROMPTS[:number]
        assert found[number] == [truth(tiny_dir, prompt).tokens for prompt in prompts]


def test_close_twice_and_use_after(make_llm) -> None:
    llm = make_llm()
    llm.generate("a", GREEDY)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosed, match="closed"):
        llm.generate("a", GREEDY)
    with pytest.raises(EngineClosed):
        next(llm.stream("a", GREEDY))


def test_a_with_block_closes(tiny_dir: Path) -> None:
    with LLM(tiny_dir, **CPU, num_blocks=16) as llm:
        llm.generate("a", GREEDY)
    with pytest.raises(EngineClosed):
        llm.generate("a", GREEDY)


def test_close_while_another_thread_generates_tells_it(make_llm) -> None:
    llm = make_llm(max_num_rows=2)
    found: list[Completion] = []
    thread = threading.Thread(target=lambda: found.extend(llm.generate(PROMPTS[:4], LONG)))
    thread.start()
    eventually(lambda: llm.stats().num_generated > 4)
    llm.close()
    thread.join(TIMEOUT_S)
    assert len(found) == 4
    assert {completion.finish_reason for completion in found} <= {"abort", "length"}
    assert "abort" in {completion.finish_reason for completion in found}


def test_a_failed_step_shows_in_its_completions_and_in_no_others(make_llm, tiny_dir: Path, monkeypatch) -> None:
    llm = make_llm(max_num_rows=2, depth=2)
    runner = llm.engine._parts.built.runner
    step = runner.step

    def broken(filled, packed_plan, out):
        if filled.plan.step == 5:
            raise RuntimeError("out of paper")
        step(filled, packed_plan, out)

    monkeypatch.setattr(runner, "step", broken)
    found = llm.generate(PROMPTS, GREEDY)
    failed = [completion for completion in found if completion.finish_reason == "error"]
    assert 1 <= len(failed) <= 2
    for prompt, completion in zip(PROMPTS, found, strict=True):
        tokens = truth(tiny_dir, prompt).tokens
        if completion in failed:
            assert completion.error == str(StepFailed("step 5 failed on the device: out of paper"))
            assert completion.token_ids == tokens[: len(completion.token_ids)]
        else:
            assert (completion.token_ids, completion.error) == (tokens, None)


def test_dummy_weights_need_only_a_config(dummy_dir: Path) -> None:
    with LLM(dummy_dir, load_format="dummy", **CPU, num_blocks=16, check=True) as llm:
        assert llm.tokenizer is None
        first, second = (llm.generate([[1, 2, 3], [4, 5]], GREEDY) for _ in range(2))
        assert [c.token_ids for c in first] == [c.token_ids for c in second]
        assert {len(c.token_ids) for c in first} == {COUNT}
        assert {c.text for c in first} == {""}


def test_dummy_weights_depend_on_the_seed(dummy_dir: Path) -> None:
    found = []
    for seed in (1, 1, 2):
        with LLM(dummy_dir, load_format="dummy", **CPU, num_blocks=16, seed=seed) as llm:
            found.append(llm.generate([[1, 2, 3]], GREEDY)[0].token_ids)
    assert found[0] == found[1] != found[2]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_leaves_the_parents_engine_alone(make_llm) -> None:
    """It is refused before it talks to the template process, and its `close` ends nothing."""
    llm = make_llm()
    talk = [{"role": "user", "content": "Hello"}]
    expected = llm.chat(talk, GREEDY).token_ids
    template = llm._client._chat._process.pid
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(EngineClosed):
            llm._client.encode_chat(talk)
            status = 2
        llm.close()
        os._exit(0 if status == 1 else status)
    assert os.waitpid(pid, 0)[1] == 0
    assert llm.chat(talk, GREEDY).token_ids == expected
    assert llm._client._chat._process.pid == template
