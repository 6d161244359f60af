"""Shapes that the engine is known to be able to compile. Others are compiled before their request is let in.

So a refusal has its status, and a grammar that took the engine down is not sent a third time: nobody who runs is to
blame for it, and the roster would not find out.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable

from gapless.core.structured import Structured
from gapless.server.engines import Engines
from gapless.server.errors import ApiError, shutting_down, timed_out

MAX_KNOWN = 512
NUM_TRIES = 2
TIMEOUT_S = 30.0  # longer than the engine's own limit
BUSY_RETRY_S = 5
READY_S = 0.05  # between two looks whether the engine is back


class CheckedShapes:
    """Asks the engine, and remembers what it said."""

    def __init__(self, engines: Engines, draining: Callable[[], bool]) -> None:
        """draining: whether the server stops, so that nobody should wait for an engine to come back."""
        self._engines = engines
        self._draining = draining
        self._known: OrderedDict[Structured, None] = OrderedDict()  # the last used at the end

    async def check_all(self, shapes: Iterable[Structured | None], deadline_s: float) -> None:
        """Raise ApiError for a shape that cannot be used, or if it is not known by then: the engine may be away."""
        try:
            async with asyncio.timeout_at(deadline_s):
                for shape in dict.fromkeys(shapes):
                    if shape is not None:
                        await self._check(shape)
        except TimeoutError:
            raise timed_out() from None

    async def _check(self, shape: Structured) -> None:
        """Raise ApiError for a shape that cannot be used."""
        if shape in self._known:
            self._known.move_to_end(shape)
            return
        for _ in range(NUM_TRIES):
            while not self._engines.is_ready:
                if self._draining():
                    raise shutting_down()
                await asyncio.sleep(READY_S)
            answer = await self._engines.check_grammar(shape, TIMEOUT_S)
            if answer is None:
                continue
            if answer.refusal is not None and answer.is_busy:
                raise ApiError(503, answer.refusal, param=shape.param, code="compiler_busy", retry_after_s=BUSY_RETRY_S)
            if answer.refusal is not None:
                raise ApiError(400, answer.refusal, param=shape.param)
            self._known[shape] = None
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
            return
        message = f"the engine did not survive the compilation of {shape.param}; it is not tried again"
        raise ApiError(500, message, param=shape.param, code="engine_crash")
