"""Questions to an engine process and their answers, matched by number.

An engine that dies answers nothing more: everybody who waits for it is told so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gapless.core.structured import Structured
from gapless.server.channel import Disconnected
from gapless.server.messages import (
    CompileGrammar,
    GrammarChecked,
    LaneTimes,
    PingLoop,
    Pong,
    ReadTimeline,
    ReadTrace,
    SavedTrace,
)

EngineQuestion = PingLoop | ReadTimeline | ReadTrace | CompileGrammar
EngineAnswer = Pong | LaneTimes | SavedTrace | GrammarChecked


class Questions:
    """The questions that wait for an answer."""

    def __init__(self, send: Callable[[EngineQuestion], None]) -> None:
        self._send = send
        self._num_asked = 0
        self._waiting: dict[int, asyncio.Future[EngineAnswer]] = {}

    async def ping(self, timeout_s: float) -> bool:
        """Whether the engine's loop answers."""
        return await self._ask(PingLoop, timeout_s) is not None

    async def timeline(self, seconds: float, timeout_s: float) -> LaneTimes | None:
        """The last seconds of each lane, or None."""
        answer = await self._ask(lambda id: ReadTimeline(id, seconds), timeout_s)
        return answer if isinstance(answer, LaneTimes) else None

    async def trace(self, timeout_s: float) -> bytes | None:
        """The timeline of the last steps, saved, or None."""
        answer = await self._ask(ReadTrace, timeout_s)
        return answer.data if isinstance(answer, SavedTrace) else None

    async def check_grammar(self, structured: Structured, timeout_s: float) -> GrammarChecked | None:
        """Whether the engine can compile it; None if the engine did not answer."""
        answer = await self._ask(lambda id: CompileGrammar(id, structured), timeout_s)
        return answer if isinstance(answer, GrammarChecked) else None

    def take(self, answer: EngineAnswer) -> None:
        waiting = self._waiting.get(answer.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def give_up(self) -> None:
        """The engine is gone."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Disconnected())

    async def _ask(self, question: Callable[[int], EngineQuestion], timeout_s: float) -> EngineAnswer | None:
        self._num_asked += 1
        id = self._num_asked
        self._waiting[id] = asyncio.get_running_loop().create_future()
        self._send(question(id))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._waiting[id]
        except (TimeoutError, Disconnected):
            return None
        finally:
            del self._waiting[id]
