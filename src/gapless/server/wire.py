"""HTTP as uvicorn speaks it, except that nonsense is answered with the error object too, and that a head has a limit.

The parser keeps the headers that it has read, however many come, before anybody has looked at the API key.
"""

from __future__ import annotations

from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gapless.server.errors import dump, error_body

MAX_HEAD_BYTES = 64 * 2**10  # of the request line and all headers, or of the trailers


class Http(HttpToolsProtocol):
    """One connection."""

    _num_head_bytes = 0  # that came since the last head or piece of a body was complete

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the headers exceed {MAX_HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        self._num_head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        super().on_message_complete()

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
