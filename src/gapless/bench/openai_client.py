"""A lightweight streaming client for OpenAI completions: plain HTTP/1.1 over asyncio, no client library.

The client must not dominate the measurement: a general client spends more time on a token than a server does.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from gapless.errors import ConfigError

MAX_LINE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a server."""

    host: str
    port: int
    tls: bool
    base: str  # path before /v1
    api_key: str | None = None

    @classmethod
    def from_url(cls, url: str, api_key: str | None = None) -> Endpoint:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--url {url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must be like http://127.0.0.1:8000, got {url!r}")
        tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, base, api_key)


@dataclass(slots=True)
class Sample:
    """The result of one request. Times are those of `time.perf_counter`."""

    due_s: float  # when it should have been sent
    first_s: float | None = None  # when the first token came
    end_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    chunk_s: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return (self.first_s if self.first_s is not None else self.end_s) - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first."""
        if self.first_s is None or self.num_output_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.num_output_tokens - 1)

    @property
    def whole_s(self) -> float:
        return self.end_s - self.due_s


async def complete(endpoint: Endpoint, body: dict[str, Any], due_s: float, timeout_s: float) -> Sample:
    """Stream one completion and note the time of each piece. Errors are part of the sample."""
    sample = Sample(due_s)
    try:
        async with asyncio.timeout(timeout_s):
            async for event in stream(endpoint, "/v1/completions", body):
                _note(sample, event)
    except TimeoutError:
        sample.error = f"no end within {timeout_s:g} s"
    except (OSError, ValueError, EOFError) as error:
        sample.error = str(error) or type(error).__name__
    sample.end_s = time.perf_counter()
    return sample


def _note(sample: Sample, event: dict[str, Any]) -> None:
    if "error" in event:
        raise ValueError(event["error"].get("message", "error"))
    usage = event.get("usage")
    if usage:
        sample.num_prompt_tokens = usage["prompt_tokens"]
        sample.num_output_tokens = usage["completion_tokens"]
    if event.get("choices"):
        now = time.perf_counter()
        sample.first_s = sample.first_s or now
        sample.chunk_s.append(now)


async def stream(endpoint: Endpoint, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The events of an answer, up to [DONE]. Raises ValueError for any other status than 200."""
    async for line in _lines(endpoint, "POST", path, json.dumps(body).encode()):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise EOFError("the stream ended before [DONE]")


async def fetch(endpoint: Endpoint, path: str) -> Any:
    """A JSON answer."""
    lines = [line async for line in _lines(endpoint, "GET", path, b"")]
    return json.loads(b"\n".join(lines))


async def _lines(endpoint: Endpoint, method: str, path: str, body: bytes) -> AsyncIterator[bytes]:
    reader, writer = await asyncio.open_connection(
        endpoint.host, endpoint.port, ssl=endpoint.tls or None, limit=MAX_LINE_BYTES
    )
    try:
        writer.write(_head(endpoint, method, path, len(body)) + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = int(head.split(" ", 2)[1])
        pieces = _chunks(reader) if "\r\ntransfer-encoding: chunked" in head else _rest(reader)
        if status != 200:
            raise ValueError(f"status {status}: {b''.join([piece async for piece in pieces]).decode(errors='replace')}")
        held = b""
        async for piece in pieces:
            *lines, held = (held + piece).split(b"\n")
            for line in lines:
                yield line
        if held:
            yield held
    finally:
        writer.close()


def _head(endpoint: Endpoint, method: str, path: str, size: int) -> bytes:
    lines = [
        f"{method} {endpoint.base}{path} HTTP/1.1",
        f"host: {endpoint.host}:{endpoint.port}",
        "content-type: application/json",
        f"content-length: {size}",
        "connection: close",
    ]
    if endpoint.api_key is not None:
        lines.append(f"authorization: Bearer {endpoint.api_key}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while (size := int((await reader.readline()).split(b";")[0] or b"0", 16)) > 0:
        yield (await reader.readexactly(size + 2))[:-2]


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(2**16):
        yield data
