"""Server-sent events, long answers, and answers that end with their client.

`EventStream` writes events as an iterator makes them and waits for the client to take them: a slow reader makes only
its own iterator wait. When the client goes away, the iterator is cancelled. Knows no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gapless.server.errors import ApiError, dump

DONE = b"data: [DONE]\n\n"
PIECE_BYTES = 256 * 2**10  # of a long answer, written at once: the socket takes many megabytes if it can, all in one go
EVENTS_A_TURN = 16
T = TypeVar("T")


class ClientGone(Exception):
    """Nobody is left to answer."""


def event(data: Any, name: str | None = None) -> bytes:
    """One event; `data` as JSON, which has no line breaks of its own."""
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + dump(data) + b"\n\n"


class EventStream(Response):
    """An answer of events. An error on the way becomes an event; the stream is closed in order all the same."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        on_error: Callable[[ApiError], bytes],
        on_close: Callable[[], None],
        write_timeout_s: float,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._on_error = on_error
        self._on_close = on_close
        self._write_timeout_s = write_timeout_s
        self.init_headers({"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGone):
                await until_gone(receive, self._send_all(send))
        finally:
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with WriteLimit(self._write_timeout_s) as limit:
            try:
                num_events = 0
                async for data in self._events:
                    await limit.write(send, data)
                    num_events += 1
                    if num_events % EVENTS_A_TURN == 0:
                        await asyncio.sleep(0)  # others have their turn
            except ApiError as error:
                await limit.write(send, self._on_error(error))
            finally:
                await _close(self._events)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class WriteLimit:
    """Ends a task whose client takes nothing for too long: such a client is as good as gone.

    There is one timer for all writes of the task. To set one for each would cost more than the write.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._began_s: float | None = None  # of the write that is not over
        self._is_hit = False

    def __enter__(self) -> WriteLimit:
        self._task = asyncio.current_task()
        self._look()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        self._timer.cancel()
        if self._is_hit and kind is asyncio.CancelledError:
            assert self._task is not None
            self._task.uncancel()
            raise ClientGone from None

    async def write(self, send: Send, data: bytes) -> None:
        """Wait until the client has room for it."""
        self._began_s = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._began_s = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        spent_s = 0.0 if self._began_s is None else loop.time() - self._began_s
        if spent_s < self._timeout_s:
            self._timer = loop.call_later(self._timeout_s - spent_s, self._look)
        elif self._task is not None:
            self._is_hit = True
            self._task.cancel()


class LongResponse(Response):
    """JSON of any length, written piece by piece."""

    def __init__(self, body: bytes, write_timeout_s: float) -> None:
        super().__init__(body, media_type="application/json")
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with contextlib.suppress(ClientGone), WriteLimit(self._write_timeout_s) as limit:
            for start in range(0, len(self.body), PIECE_BYTES):
                await limit.write(send, bytes(self.body[start : start + PIECE_BYTES]))
                await asyncio.sleep(0)  # others have their turn
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work unless the client leaves first: then cancel it and raise ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await future


async def finish_for(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """As `until_gone`, for a request whose body was read."""
    return await until_gone(request.receive, work)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _close(events: AsyncIterator[bytes]) -> None:
    close: Callable[[], Awaitable[None]] | None = getattr(events, "aclose", None)
    if close is not None:
        await close()
