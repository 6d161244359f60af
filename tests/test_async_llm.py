"""`AsyncLLM`: many callers on one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from fakes import check_empty
from gapless import AsyncLLM, Completion, SamplingParams
from gapless.errors import EngineClosed, InvalidRequest
from tiny import COUNT, CPU, PROMPTS, ids, text_of, truth

TIMEOUT_S = 20.0
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)


@pytest.fixture
def run(tiny_dir: Path) -> Callable[..., Any]:
    """Runs a coroutine function on an engine of its own, and checks that nothing of it is left."""

    def go(work: Callable[[AsyncLLM], Coroutine[Any, Any, Any]], **options: Any) -> Any:
        async def main() -> Any:
            values = CPU | {"depth": 2, "num_blocks": 64, "check": True} | options
            async with AsyncLLM(tiny_dir, **values) as llm:
                result = await asyncio.wait_for(work(llm), TIMEOUT_S)
            check_empty(llm._client.engine._scheduler)
            return result

        return asyncio.run(main())

    return go


async def gather_text(llm: AsyncLLM, prompt: str, params: SamplingParams) -> tuple[str, tuple[int, ...], Completion]:
    text, tokens, end = "", [], None
    async for delta in llm.stream(prompt, params):
        text += delta.text
        tokens += delta.token_ids
        end = delta.completion
    assert end is not None
    return text, tuple(tokens), end


async def idle(llm: AsyncLLM) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while llm._client.engine._scheduler.has_requests:
        assert time.monotonic() < deadline, "a request was left behind"
        await asyncio.sleep(0.001)


def test_generate(run, tiny_dir: Path) -> None:
    found = run(lambda llm: llm.generate("Hello, world", GREEDY))
    assert (found.token_ids, found.finish_reason) == (truth(tiny_dir, "Hello, world").tokens, "length")


@pytest.mark.parametrize("options", [{"depth": 1}, {"depth": 3}, {"interleave": 3}, {"num_blocks": 9}], ids=str)
def test_streams_in_parallel(run, tiny_dir: Path, options: dict[str, Any]) -> None:
    async def work(llm: AsyncLLM) -> list[tuple[str, tuple[int, ...], Completion]]:
        return await asyncio.gather(*(gather_text(llm, prompt, GREEDY) for prompt in PROMPTS))

    for prompt, (text, tokens, end) in zip(PROMPTS, run(work, **options), strict=True):
        assert tokens == end.token_ids == truth(tiny_dir, prompt).tokens
        assert text == end.text == text_of(tokens)


def test_streams_really_overlap(run) -> None:
    async def work(llm: AsyncLLM) -> list[int]:
        order: list[int] = []

        async def one(number: int) -> None:
            async for _ in llm.stream(PROMPTS[number], GREEDY):
                order.append(number)

        await asyncio.gather(one(0), one(1))
        return order

    order = run(work)
    assert order != sorted(order)
    assert len(order) == 2 * (COUNT + 1)


def test_chat(run) -> None:
    talk = [{"role": "user", "content": "hi"}]

    async def work(llm: AsyncLLM) -> None:
        answer = await llm.chat(talk, GREEDY)
        assert answer.prompt_token_ids == tuple(ids("user: hi|assistant:"))
        *_, last = [delta async for delta in llm.stream_chat(talk, GREEDY)]
        assert last.completion == Completion(
            answer.text, answer.token_ids, "length", answer.prompt_token_ids, last.completion.num_cached_tokens
        )

    run(work)


def test_leaving_a_stream_frees_its_row_and_blocks(run, tiny_dir: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        stream = llm.stream("Hello", LONG)
        async for _ in stream:
            break
        await stream.aclose()
        await idle(llm)
        assert (await llm.generate("a", GREEDY)).token_ids == truth(tiny_dir, "a").tokens
        assert llm.stats().num_generated < 100

    run(work)


def test_cancelling_a_task_frees_its_row_and_blocks(run, tiny_dir: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        started = asyncio.Event()

        async def read() -> None:
            async for _ in llm.stream("Hello", LONG):
                started.set()

        other = asyncio.create_task(llm.generate("a", GREEDY))
        tasks = [asyncio.create_task(read()) for _ in range(5)]
        await started.wait()
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert (await other).token_ids == truth(tiny_dir, "a").tokens
        await idle(llm)

    run(work, max_num_rows=3)


def test_cancelling_generate_frees_its_row_and_blocks(run) -> None:
    async def work(llm: AsyncLLM) -> None:
        task = asyncio.create_task(llm.generate("Hello", LONG))
        while llm.stats().num_generated == 0:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(llm)

    run(work)


def test_a_timeout_ends_the_request(run) -> None:
    async def work(llm: AsyncLLM) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.0):
                await llm.generate("Hello", LONG)
        await idle(llm)

    run(work)


def test_stop_strings(run, tiny_dir: Path) -> None:
    text = text_of(truth(tiny_dir, "0123456789").tokens)
    stop = text[4:7]
    params = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True, stop=stop)

    async def work(llm: AsyncLLM) -> None:
        shown, _, end = await gather_text(llm, "0123456789", params)
        assert shown == end.text == text[: text.index(stop)]
        assert (end.finish_reason, end.stop) == ("stop", stop)

    run(work)


def test_bad_input_is_refused_before_the_first_token(run) -> None:
    async def work(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidRequest, match="empty"):
            llm.stream("", GREEDY)
        with pytest.raises(InvalidRequest, match="params must be SamplingParams"):
            await llm.generate("a", {"max_tokens": 3})
        with pytest.raises(InvalidRequest, match="messages must not be empty"):
            await llm.chat([])

    run(work)


def test_close_tells_those_who_wait(tiny_dir: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(tiny_dir, **CPU, depth=2, num_blocks=64, check=True)
        task = asyncio.create_task(llm.generate("Hello", LONG))
        while llm.stats().num_generated == 0:
            await asyncio.sleep(0)
        await llm.close()
        await llm.close()
        found = await asyncio.wait_for(task, TIMEOUT_S)
        assert found.finish_reason in ("abort", "length")
        with pytest.raises(EngineClosed):
            await llm.generate("a", GREEDY)

    asyncio.run(main())


def test_an_event_loop_that_is_gone_harms_nobody(tiny_dir: Path) -> None:
    llm = AsyncLLM(tiny_dir, **CPU, depth=2, num_blocks=64, check=True)

    async def abandon() -> None:
        stream = llm.stream("Hello", LONG)
        await stream.__anext__()  # and never close it: the loop ends with the request running

    asyncio.run(abandon())

    async def again() -> Completion:
        async with llm:
            return await asyncio.wait_for(llm.generate("a", GREEDY), TIMEOUT_S)

    assert asyncio.run(again()).token_ids == truth(tiny_dir, "a").tokens
