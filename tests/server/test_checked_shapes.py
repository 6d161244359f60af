"""Shapes before their request is let in: nobody waits for ever for an engine that is away."""

from __future__ import annotations

import asyncio

import pytest

from gapless.config import EngineOptions
from gapless.core.structured import Structured, read_structured
from gapless.server.checked_shapes import CheckedShapes
from gapless.server.errors import ApiError
from gapless.server.messages import GrammarChecked
from gapless.server.supervisor import Supervisor

SHAPE = read_structured({"regex": "a+"})


async def status_of(shapes: CheckedShapes, seconds: float) -> int:
    with pytest.raises(ApiError) as caught:
        await shapes.check_all([None, SHAPE], asyncio.get_running_loop().time() + seconds)
    return caught.value.status


def test_an_engine_that_is_away_is_awaited_until_the_deadline() -> None:
    async def go() -> int:
        return await status_of(CheckedShapes(Supervisor(EngineOptions()), lambda: False), 0.1)

    assert asyncio.run(asyncio.wait_for(go(), 10)) == 408


def test_a_server_that_stops_waits_for_no_engine() -> None:
    async def go() -> int:
        return await status_of(CheckedShapes(Supervisor(EngineOptions()), lambda: True), 60)

    assert asyncio.run(asyncio.wait_for(go(), 10)) == 503


def test_a_shape_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Structured] = []

    async def answer(self: Supervisor, structured: Structured, timeout_s: float) -> GrammarChecked:
        asked.append(structured)
        return GrammarChecked(1, None)

    async def go() -> None:
        supervisor = Supervisor(EngineOptions())
        supervisor.is_ready = True
        shapes = CheckedShapes(supervisor, lambda: False)
        for _ in range(2):
            await shapes.check_all([SHAPE, SHAPE, None], asyncio.get_running_loop().time() + 10)

    monkeypatch.setattr(Supervisor, "check_grammar", answer)
    asyncio.run(go())
    assert asked == [SHAPE]


def test_a_busy_compiler_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape is not to blame: 503, and the next try asks the engine again."""
    answers = [GrammarChecked(1, "others", is_busy=True), GrammarChecked(2, "wrong")]

    async def answer(self: Supervisor, structured: Structured, timeout_s: float) -> GrammarChecked:
        return answers.pop(0)

    monkeypatch.setattr(Supervisor, "check_grammar", answer)

    async def go() -> list[int]:
        supervisor = Supervisor(EngineOptions())
        supervisor.is_ready = True
        shapes = CheckedShapes(supervisor, lambda: False)
        return [await status_of(shapes, 5) for _ in range(2)]

    assert asyncio.run(go()) == [503, 400]
