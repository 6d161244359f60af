"""Chat templates of a server: each in a process that can be stopped, and a slow one in nobody's way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from gapless.errors import CorruptModel, InvalidRequest
from gapless.server.render_pool import NUM_PROCESSES, NUM_SLOW, RenderPool
from gapless.text.chat import Conversation
from gapless.text.render_process import QUICK_S, TemplateSource

T = TypeVar("T")
TALK = Conversation([{"role": "user", "content": "hi"}], {})
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ECHO = "{{ messages[0].content }}!"


async def render(pool: RenderPool, talk: Conversation = TALK) -> str | None:
    return (await pool.run(lambda process: process.render([talk])))[0]


def with_pool(template: str | None, use: Callable[[RenderPool], Coroutine[Any, Any, T]], timeout_s: float = 5.0) -> T:
    async def go() -> T:
        pool = RenderPool(TemplateSource(template), timeout_s)
        try:
            return await use(pool)
        finally:
            pool.close()
            assert pool.pids == []

    return asyncio.run(go())


def test_a_template_renders_in_its_own_process() -> None:
    assert with_pool(ECHO, render) == "hi!"
    with pytest.raises(InvalidRequest, match="no chat template"):
        with_pool(None, render)
    with pytest.raises(CorruptModel, match="does not parse"):
        with_pool("{% if %}", render)


def test_nobody_notices_that_an_idle_template_process_was_killed() -> None:
    async def use(pool: RenderPool) -> str | None:
        await render(pool)
        os.kill(pool.pids[0], signal.SIGKILL)
        return await render(pool)

    assert with_pool(ECHO, use) == "hi!"


def test_one_chat_after_the_other_needs_one_process() -> None:
    async def use(pool: RenderPool) -> list[int]:
        await pool.start()
        for _ in range(5):
            await render(pool)
        return pool.pids

    assert len(with_pool(ECHO, use)) == 1


def test_slow_chats_do_not_hold_up_the_others() -> None:
    """Of six slow ones two may take their time. The others are stopped soon, and a quick chat comes in between."""
    slow = Conversation([{"role": "user", "content": "slow"}], {})
    template = "{% if messages[0].content == 'slow' %}" + LOOPS + "{% endif %}" + ECHO

    async def quick_first(pool: RenderPool) -> list[BaseException | str | None]:
        await asyncio.gather(*(render(pool) for _ in range(NUM_PROCESSES)))
        all_slow = asyncio.gather(*(render(pool, slow) for _ in range(NUM_PROCESSES + 2)), return_exceptions=True)
        await asyncio.sleep(QUICK_S / 2)
        assert await render(pool) == "hi!"
        assert not all_slow.done(), "the quick chat waited for all slow ones"
        return await all_slow

    kinds = sorted(type(error).__name__ for error in with_pool(template, quick_first, timeout_s=4.0))
    assert kinds == ["InvalidRequest"] * NUM_SLOW + ["TemplateBusy"] * (NUM_PROCESSES + 2 - NUM_SLOW)


@pytest.mark.parametrize(
    "template",
    [
        LOOPS,
        "{{ 9 ** (9 ** 9) }}",  # one operation, which no other thread of the same process could interrupt
    ],
    ids=["loops", "powers"],
)
def test_a_hostile_template_neither_stalls_the_event_loop_nor_outlives_its_time(template: str) -> None:
    async def use(pool: RenderPool) -> float:
        longest, last = 0.0, asyncio.get_running_loop().time()

        async def tick() -> None:
            nonlocal longest, last
            while True:
                await asyncio.sleep(0.01)
                now = asyncio.get_running_loop().time()
                longest, last = max(longest, now - last), now

        ticking = asyncio.create_task(tick())
        for _ in range(2):  # the second needs a different process
            with pytest.raises(InvalidRequest, match=r"longer than 0\.5 s"):
                await render(pool)
        ticking.cancel()
        return longest

    assert with_pool(template, use, timeout_s=0.5) < 0.4


def test_a_template_cannot_take_all_memory() -> None:
    with pytest.raises(InvalidRequest, match=r"memory|could not be rendered|refused"):
        with_pool("{{ 'x' * 10 ** 11 }}", render, timeout_s=20)


def test_a_template_cannot_reach_files() -> None:
    with pytest.raises(InvalidRequest, match="refused"):
        with_pool("{{ ''.__class__.__mro__[1].__subclasses__() }}", render)
