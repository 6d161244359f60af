"""Garbage collection keeps out of the way while work goes on, and nothing stays left out of it afterwards."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from gapless import LLM, AsyncLLM, SamplingParams
from gapless.garbage import left_out
from tiny import CPU


class Ring:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_exists_is_left_out_and_comes_back() -> None:
    before = weakref.ref(Ring())
    with left_out():
        new = weakref.ref(Ring())
        assert gc.get_freeze_count() > 1000
        gc.collect()
        assert new() is None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None


def test_the_last_to_leave_gives_back() -> None:
    with left_out():
        with left_out():
            pass
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with left_out():
        assert gc.get_freeze_count() <= count
    assert count - 100 <= gc.get_freeze_count() <= count


PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


def test_generating_leaves_out_what_exists(dummy_dir: Path) -> None:
    with LLM(dummy_dir, load_format="dummy", **CPU) as llm:
        some = llm.run(enumerate([llm.prepare([1, 2, 3], PARAMS), llm.prepare([4, 5], PARAMS)]))
        next(some)
        assert gc.get_freeze_count() > 1000
        some.close()  # left in the middle
        assert gc.get_freeze_count() == 0
        frozen = [gc.get_freeze_count() for _ in llm.stream([1, 2, 3], PARAMS)]
        assert min(frozen) > 1000
        llm.generate([[1, 2, 3]], PARAMS)
        assert gc.get_freeze_count() == 0


def test_so_does_async_code(dummy_dir: Path) -> None:
    async def ask() -> None:
        async with AsyncLLM(dummy_dir, load_format="dummy", **CPU) as llm:
            frozen = [gc.get_freeze_count() async for _ in llm.stream([1, 2, 3], PARAMS)]
            assert min(frozen) > 1000
            await asyncio.gather(llm.generate([1, 2, 3], PARAMS), llm.generate([4, 5], PARAMS))
            assert gc.get_freeze_count() == 0

    asyncio.run(ask())
