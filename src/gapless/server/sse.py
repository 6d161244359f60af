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
        try:
            async for data in self._events:
                await _write(send, data, self._write_timeout_s)
        except ApiError as error:
            await _write(send, self._on_error(error), self._write_timeout_s)
        finally:
            await _close(self._events)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class LongResponse(Response):
    """JSON of any length, written piece by piece."""

    def __init__(self, body: bytes, write_timeout_s: float) -> None:
        super().__init__(body, media_type="application/json")
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with contextlib.suppress(ClientGone):
            for start in range(0, len(self.body), PIECE_BYTES):
                await _write(send, bytes(self.body[start : start + PIECE_BYTES]), self._write_timeout_s)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _write(send: Send, data: bytes, timeout_s: float) -> None:
    """Wait until the client has room for it; one that takes nothing for too long is as good as gone."""
    try:
        async with asyncio.timeout(timeout_s):
            await send({"type": "http.response.body", "body": data, "more_body": True})
    except TimeoutError:
        raise ClientGone from None
    await asyncio.sleep(0)


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
