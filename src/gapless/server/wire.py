"""HTTP as uvicorn speaks it, except that nonsense is answered with the error object too."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gapless.server.errors import dump, error_body


class Http(HttpToolsProtocol):
    """One connection."""

    def send_400_response(self, msg: str) -> None:
        body = dump(error_body(400, msg))
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()
