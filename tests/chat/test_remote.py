"""A server as partner: a stub that answers as OpenAI's API does, and all the ways in which it does not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gapless.chat.remote import RemotePartner
from gapless.chat.reply import ReplyEnd
from gapless.errors import ConfigError, InvalidRequest, ServerUnreachable
from gapless.text.deltas import ToolCall, WholeReply
from gapless.text.tools.base import Tool

TOOLS = (Tool("add", {"type": "object"}, strict=True),)
TALK = [{"role": "user", "content": "a"}]


class Stub:
    """Answers every chat with the same bytes, and keeps the last body."""

    def __init__(self) -> None:
        self.models: Any = {"data": [{"id": "one", "max_model_len": 64}, {"id": "two"}]}
        self.status = 200
        self.data = b""
        self.body: dict[str, Any] = {}
        self.headers: dict[str, str] = {}
        self.url = ""

    def stream(self, *events: Any, done: bool = True) -> None:
        lines = [b": a comment\n\n", *(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)]
        self.data = b"".join([*lines, b"data: [DONE]\n\n" if done else b""])


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/base/v1/models"
            self.answer(200, json.dumps(stub.models).encode())

        def do_POST(self) -> None:
            assert self.path == "/base/v1/chat/completions"
            stub.headers = dict(self.headers)
            stub.body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.answer(stub.status, stub.data)

        def answer(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    stub.url = f"http://127.0.0.1:{server.server_port}/base/v1/"
    yield stub
    server.shutdown()
    server.server_close()


def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def partner(stub: Stub, **options: Any) -> RemotePartner:
    return RemotePartner(stub.url, **options)


def test_a_stream_becomes_parts(stub: Stub) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}
    call = {"index": 3, "id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a":'}}
    more = {"index": 3, "function": {"arguments": "1}"}}
    stub.stream(
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "hm"}),
        chunk({"content": "é"}),
        chunk({"tool_calls": [call]}),
        chunk({"tool_calls": [more]}),
        chunk({}, "tool_calls"),
        usage,
    )
    *parts, end = partner(stub, api_key="k", model="two").answer(TALK, {"temperature": 0.5}, TOOLS)
    reply = WholeReply()
    reply.add(part for part in parts if not isinstance(part, ReplyEnd))
    assert reply == WholeReply("é", "hm", [ToolCall("x", "add", '{"a":1}')])
    assert end == ReplyEnd("tool_calls", 4, 2)
    assert stub.headers["authorization"] == "Bearer k"
    expected: dict[str, Any] = {"model": "two", "messages": TALK, "temperature": 0.5, "stream": True}
    function = {"name": "add", "parameters": {"type": "object"}, "strict": True}
    expected["tools"] = [{"type": "function", "function": function}]
    assert stub.body == expected | {"stream_options": {"include_usage": True}}


def test_what_it_says_of_itself(stub: Stub) -> None:
    assert partner(stub).description.startswith("one at http://127.0.0.1:")
    assert partner(stub).description.endswith("context of 64 tokens")


@pytest.mark.parametrize(
    ("status", "data", "error", "words"),
    [
        (400, b'{"error": {"message": "too hot"}}', InvalidRequest, "too hot"),
        (500, b"oops", InvalidRequest, "status 500"),
        (200, b'data: {"error": {"message": "it broke"}}\n\n', InvalidRequest, "it broke"),
        (200, b"data: {broken\n\n", ServerUnreachable, "not a JSON object"),
        (200, b'data: {"choices": []}\n\n', ServerUnreachable, "before its end"),
        (200, b"<html>", ServerUnreachable, "before its end"),
    ],
)
def test_answers_that_are_none(stub: Stub, status: int, data: bytes, error: type[Exception], words: str) -> None:
    found = partner(stub)
    stub.status, stub.data = status, data
    with pytest.raises(error, match=words):
        list(found.answer(TALK, {}, ()))


@pytest.mark.parametrize(
    ("models", "words"), [({"data": []}, "has no model"), ([], "does not list"), ({"data": [{}]}, "does not list")]
)
def test_a_server_without_models(stub: Stub, models: Any, words: str) -> None:
    stub.models = models
    with pytest.raises(ServerUnreachable, match=words):
        partner(stub)


def test_wrong_addresses(stub: Stub) -> None:
    with pytest.raises(ConfigError, match="has no model 'three'; it has one, two"):
        partner(stub, model="three")
    with pytest.raises(ServerUnreachable, match="refused"):
        RemotePartner("http://127.0.0.1:1")
    for url in ("127.0.0.1:8000", "ftp://x", "http://", "http://x:99999999"):
        with pytest.raises(ConfigError, match="--url"):
            RemotePartner(url)
