"""A server as the partner of a conversation: any endpoint of OpenAI's chat completions, over plain HTTP.

Knows the wire format of streams. Needs no package, so that a laptop can talk to a server without a model of its own.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from gapless.chat.reply import ReplyEnd
from gapless.core.structured import read_structured
from gapless.errors import ConfigError, InvalidRequest, ServerUnreachable
from gapless.text.deltas import CallArguments, CallBegin, Content, Reasoning, ReplyDelta
from gapless.text.tools.base import Tool

CONNECT_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 2**24
SHAPE_NAMES = {"json_schema": "json"}  # vLLM's


class RemotePartner:
    """Each answer has a connection of its own: closing it ends the request."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        self._url = url
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"--url {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not self._host:
            raise ConfigError(f"--url must be like http://127.0.0.1:8000, got {url!r}")
        self._has_tls = parts.scheme == "https"
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._card = self._find(model)

    @property
    def description(self) -> str:
        length = self._card.get("max_model_len")
        return f"{self._card['id']} at {self._url}" + (f", context of {length} tokens" if length else "")

    def answer(
        self, messages: Sequence[Mapping[str, Any]], params: Mapping[str, Any], tools: Sequence[Tool]
    ) -> Iterator[ReplyDelta | ReplyEnd]:
        body = {"model": self._card["id"], "messages": list(messages), **_spelled(params)}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"tools": [_described(tool) for tool in tools]} if tools else {}
        reason, usage, places = None, dict[str, int](), dict[int, int]()
        with self._asked("POST", "/v1/chat/completions", body) as response:
            for event in _events(response):
                if "error" in event:
                    raise InvalidRequest(_message(event) or "the server reported an error")
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    reason = choice.get("finish_reason") or reason
                    yield from _deltas(choice.get("delta") or {}, places)
        yield ReplyEnd(reason or "stop", usage.get("prompt_tokens"), usage.get("completion_tokens"))

    def close(self) -> None:
        """Nothing is open between answers."""

    def _find(self, model: str | None) -> dict[str, Any]:
        """The model's entry in the server's list: the one with this name, or the first."""
        with self._asked("GET", "/v1/models") as response:
            try:
                cards = [dict(card) for card in json.loads(response.read())["data"]]
                names = [card["id"] for card in cards]
            except (ValueError, KeyError, TypeError):
                raise ServerUnreachable(f"{self._url} does not list its models as an OpenAI endpoint does") from None
        if not names:
            raise ServerUnreachable(f"{self._url} has no model")
        if model is not None and model not in names:
            raise ConfigError(f"{self._url} has no model {model!r}; it has {', '.join(names)}")
        return cards[0 if model is None else names.index(model)]

    @contextlib.contextmanager
    def _asked(self, method: str, path: str, body: object = None) -> Iterator[http.client.HTTPResponse]:
        """The answer to a request, if it is a success. Raises InvalidRequest and ServerUnreachable."""
        kind = http.client.HTTPSConnection if self._has_tls else http.client.HTTPConnection
        connection = kind(str(self._host), self._port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            connection.sock.settimeout(None)  # an answer may take as long as it does: Ctrl-C stops it
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._base + path, data, self._headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise InvalidRequest(_refusal(response))
            yield response
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ServerUnreachable(f"{self._url}: {reason}") from None
        finally:
            connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := response.readline(MAX_LINE_BYTES):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise ServerUnreachable("the server sent an event that is not a JSON object")
        yield event
    raise ServerUnreachable("the server ended the answer before its end")


def _spelled(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters in the spelling of servers: OpenAI's for JSON, vLLM's for other shapes. Raises InvalidRequest."""
    body = dict(params)
    shape = body.pop("structured", None)
    if shape is None:
        return body
    read = read_structured(shape)
    if read.whitespace is not None or read.kind not in ("json_schema", "json_object"):
        return body | {"structured_outputs": {SHAPE_NAMES.get(kind, kind): value for kind, value in shape.items()}}
    if read.kind == "json_object":
        return body | {"response_format": {"type": read.kind}}
    schema = {"name": "answer", "schema": json.loads(read.text), "strict": True}
    return body | {"response_format": {"type": read.kind, read.kind: schema}}


def _described(tool: Tool) -> dict[str, Any]:
    described = tool.described()
    return described | {"function": described["function"] | ({"strict": True} if tool.strict else {})}


def _deltas(delta: Mapping[str, Any], places: dict[int, int]) -> Iterator[ReplyDelta]:
    """The parts of a chunk. `places` has the calls so far: a server may number them with gaps."""
    if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
        yield Reasoning(reasoning)
    if content := delta.get("content"):
        yield Content(content)
    for call in delta.get("tool_calls") or ():
        function, number = call.get("function") or {}, call.get("index") or 0
        if number not in places:
            places[number] = len(places)
            yield CallBegin(places[number], call.get("id") or "", function.get("name") or "")
        if arguments := function.get("arguments"):
            yield CallArguments(places[number], arguments)


def _refusal(response: http.client.HTTPResponse) -> str:
    raw = response.read(MAX_LINE_BYTES)
    try:
        message = _message(json.loads(raw))
    except ValueError:
        message = None
    return message or f"the server answered with status {response.status}"


def _message(body: Any) -> str | None:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message) if message else None
