"""The checks that every HTTP request passes: an id, the host that it names, the API key, the size of its body, and the
access log on its way out.

A plain ASGI middleware. Answers with the OpenAI error object whatever it does not let through. Knows no routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gapless.server.errors import ApiError, error_response
from gapless.server.metrics import Metrics
from gapless.server.options import ServerOptions
from gapless.server.traces import Traces

QUIET_PATHS = frozenset(("/health", "/ready", "/metrics", "/state"))  # asked for all the time: logged when debugging
CLIENT = "gapless.client"  # in a scope: whose request it is, by key or by address
LINGER_S = 2.0  # for the rest of a body that was not wanted
OPEN_PATHS = frozenset(("/", "/health", "/ready", "/version", "/metrics", "/docs", "/openapi.json"))
log = logging.getLogger("gapless.server.access")


class Gate:
    """Wraps an application."""

    def __init__(
        self, app: ASGIApp, options: ServerOptions, keys: Sequence[str], metrics: Metrics, traces: Traces
    ) -> None:
        self._app = app
        self._options = options
        self._keys = [_digest(key) for key in keys]
        self._hosts = options.allowed_hosts(has_keys=bool(keys))
        self._metrics = metrics
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        passage = Passage(self._options, scope, receive, send)
        started_s = time.monotonic()
        try:
            with self._traces.span(scope, passage.id) as span:
                await self._pass(scope, passage)
                if span is not None:
                    span.set_attribute("http.response.status_code", passage.status)
        except ApiError as error:
            await passage.refuse(error)
        except Exception:
            log.exception("an unexpected error", extra={"request_id": passage.id})
            await passage.refuse(ApiError(500, "internal error"))
        finally:
            self._record(scope, passage, time.monotonic() - started_s)

    async def _pass(self, scope: Scope, passage: Passage) -> None:
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:  # a proxy may have looked at the other one
            raise ApiError(400, "more than one Host header", code="ambiguous_host")
        self._check_host(_host_name(_header(scope, b"host")))
        key = self._find_key(scope)
        if self._keys and scope["path"] not in OPEN_PATHS and key is None:
            raise ApiError(401, "missing or wrong API key", code="invalid_api_key")
        scope[CLIENT] = f"key {key}" if key is not None else (scope.get("client") or [""])[0]
        declared = _header(scope, b"content-length")
        if declared.isdigit() and int(declared) > self._options.max_body_bytes:
            raise passage.too_large()
        await self._app(scope, passage.receive, passage.send)

    def _check_host(self, name: str) -> None:
        """Raise ApiError for a name that is not this server's. No browser leaves it out."""
        if self._hosts and name and name not in self._hosts:
            text = f"this server is not {name!r}; it can be told to be with --allowed-host"
            raise ApiError(403, text, code="host_not_allowed")

    def _find_key(self, scope: Scope) -> int | None:
        """Which of the keys was sent."""
        scheme, _, key = _header(scope, b"authorization").partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(given, known) for known in self._keys]  # all of them, every time
        return matches.index(True) if any(matches) and scheme.lower() == b"bearer" else None

    def _record(self, scope: Scope, passage: Passage, seconds: float) -> None:
        status = passage.status
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.http.labels(route, str(status or "gone")).inc()
        client = scope.get("client")
        extra = {
            "request_id": passage.id,
            "client_request_id": _header(scope, b"x-request-id")[:128].decode("latin-1"),
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "duration_s": round(seconds, 6),
            "client": client[0] if client else None,
        }
        level = logging.DEBUG if scope["path"] in QUIET_PATHS and status == 200 else logging.INFO
        log.log(level, "%s %s %s", scope["method"], scope["path"], status or "client gone", extra=extra)


class Passage:
    """One request on its way through: receives a body of limited size in limited time, marks the answer with its id."""

    def __init__(self, options: ServerOptions, scope: Scope, receive: Receive, send: Send) -> None:
        self.id = f"req_{uuid.uuid4().hex}"
        self.status = 0  # of the answer, once it has begun
        self._options = options
        self._scope = scope
        self._receive = receive
        self._send = send
        self._deadline_s = asyncio.get_running_loop().time() + options.body_timeout
        self._num_bytes = 0
        self._is_complete = False
        self._failure: ApiError | None = None  # found while the body was read; whoever read it may have swallowed it

    async def receive(self) -> Message:
        if self._is_complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            text = f"the request body did not arrive within {self._options.body_timeout:g} s"
            self._failure = ApiError(408, text, code="timeout")
            raise self._failure from None
        self._num_bytes += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        if self._num_bytes > self._options.max_body_bytes:
            self._failure = self.too_large()
            raise self._failure
        return message

    async def send(self, message: Message) -> None:
        if self._failure is not None:
            await self.refuse(self._failure)
        else:
            await self._answer(message)

    async def _answer(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message["headers"], (b"x-request-id", self.id.encode())]}
        elif not message.get("more_body", False) and not self._is_complete:
            await self._send({**message, "more_body": True})
            await self._discard()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def _discard(self) -> None:
        """Take the rest of the body, for a while: who is still sending would lose the answer with the connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not self._is_complete:
                    self._is_complete = not (await self._receive()).get("more_body", False)

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error, unless an answer has begun."""
        if self.status == 0:
            await error_response(error)(self._scope, self._receive, self._answer)

    def too_large(self) -> ApiError:
        return ApiError(413, f"the request body is larger than {self._options.max_body}", code="body_too_large")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _host_name(header: bytes) -> str:
    """Without port, brackets and case."""
    text = header.decode("latin-1").strip().lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0].removesuffix(".")


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")
