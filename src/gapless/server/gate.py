"""What every HTTP request passes on its way in and out: an id, the API key, the size of its body, the access log.

A plain ASGI middleware. Answers with the OpenAI error object whatever it does not let through. Knows no routes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Sequence
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gapless.server.errors import ApiError, error_response
from gapless.server.metrics import Metrics
from gapless.server.options import ServerOptions
from gapless.server.traces import Traces

OPEN_PATHS = frozenset(("/", "/health", "/ready", "/version", "/metrics", "/docs", "/openapi.json"))
log = logging.getLogger("gapless.server.access")
request_id: ContextVar[str] = ContextVar("request_id", default="")


class Gate:
    """Wraps an application."""

    def __init__(
        self, app: ASGIApp, options: ServerOptions, keys: Sequence[str], metrics: Metrics, traces: Traces
    ) -> None:
        self._app = app
        self._options = options
        self._keys = [_digest(key) for key in keys]
        self._metrics = metrics
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id = f"req_{uuid.uuid4().hex}"
        request_id.set(id)
        status, started_s = 0, time.monotonic()

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", id.encode())]}
            await send(message)

        try:
            with self._traces.span(scope, id):
                await self._pass(scope, receive, sending)
        except ApiError as error:  # while the body was read, or after the answer began
            if status == 0:
                await error_response(error)(scope, receive, sending)
        except Exception:
            log.exception("an unexpected error", extra={"request_id": id})
            if status == 0:
                await error_response(ApiError(500, "internal error"))(scope, receive, sending)
        finally:
            self._record(scope, id, status, time.monotonic() - started_s)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and scope["path"] not in OPEN_PATHS and not self._has_key(scope):
            raise ApiError(401, "missing or wrong API key", code="invalid_api_key")
        declared = _header(scope, b"content-length")
        if declared.isdigit() and int(declared) > self._options.max_body_bytes:
            raise self._too_large()
        await self._app(scope, self._limited(receive), send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, key = _header(scope, b"authorization").partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(given, known) for known in self._keys]  # all of them, every time
        return any(matches) and scheme.lower() == b"bearer"

    def _limited(self, receive: Receive) -> Receive:
        """Receive a body of limited size, in limited time."""
        options = self._options
        deadline_s = asyncio.get_running_loop().time() + options.body_timeout
        num_bytes, complete = 0, False

        async def receiving() -> Message:
            nonlocal num_bytes, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline_s):
                    message = await receive()
            except TimeoutError:
                text = f"the request body did not arrive within {options.body_timeout:g} s"
                raise ApiError(408, text, code="timeout") from None
            num_bytes += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if num_bytes > options.max_body_bytes:
                raise self._too_large()
            return message

        return receiving

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the request body is larger than {self._options.max_body}", code="body_too_large")

    def _record(self, scope: Scope, id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.http.labels(route, str(status or "gone")).inc()
        client = scope.get("client")
        extra = {
            "request_id": id,
            "client_request_id": _header(scope, b"x-request-id")[:128].decode("latin-1"),
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "duration_s": round(seconds, 6),
            "client": client[0] if client else None,
        }
        log.info("%s %s %s", scope["method"], scope["path"], status or "client gone", extra=extra)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")
