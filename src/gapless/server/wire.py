"""HTTP as uvicorn speaks it, except that nonsense is answered with the error object too, and that a head has limits.

The parser keeps the headers that it has read, however many come and however slowly, before anybody has looked at the
API key. Knows no routes. The time for a body is the gate's, but for what still comes after the answer.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gapless.server.errors import dump, error_body

MAX_HEAD_BYTES = 64 * 2**10  # of the request line and all headers, or of the trailers


class Http(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, header_timeout_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_timeout_s = header_timeout_s
        self._alarm: asyncio.TimerHandle | None = (
            None  # while a head, or the rest of an answered request, is waited for
        )
        self._is_in_head = False
        self._is_in_body = False
        self._num_head_bytes = 0  # that came since the last head or piece of a body was complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_alarm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_alarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the headers exceed {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        self._set_alarm()
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._clear_alarm()
        self._num_head_bytes = 0
        self._is_in_head, self._is_in_body = False, True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._clear_alarm()
        self._num_head_bytes = 0
        self._is_in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_body:
            self._set_alarm()

    def _set_alarm(self) -> None:
        self._clear_alarm()
        self._alarm = self.loop.call_later(self._header_timeout_s, self._give_up)

    def _clear_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _give_up(self) -> None:
        """The head or the body of a request did not arrive in time."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._set_alarm()  # an answer is under way, which must not be cut in two
        elif self._is_in_head:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the headers did not arrive within {self._header_timeout_s:g} s")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        body = dump(error_body(status, message))
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        )
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        self.transport.close()
