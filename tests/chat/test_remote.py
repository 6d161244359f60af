"""A server as partner: a stub that answers as OpenAI's API does, and all the ways in which it does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gapless.chat.remote import RemotePartner
from gapless.chat.reply import ReplyEnd
from gapless.errors import ConfigError, InvalidRequest, ServerUnreachable
from gapless.text.deltas import ToolCall, WholeReply
from gapless.text.tools.base import Tool
from stub_api import StubApi, stub_api

TOOLS = (Tool("add", {"type": "object"}, strict=True),)
TALK = [{"role": "user", "content": "a"}]


@pytest.fixture
def stub() -> Iterator[StubApi]:
    with stub_api("/base") as stub:
        yield stub


def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def partner(stub: StubApi, **options: Any) -> RemotePartner:
    return RemotePartner(f"{stub.url}/v1/", **options)


def test_a_stream_becomes_parts(stub: StubApi) -> None:
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
    assert stub.asked == [expected | {"stream_options": {"include_usage": True}}]


@pytest.mark.parametrize(
    ("shape", "sent"),
    [
        (
            {"json_schema": '{"type": "object"}'},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
        ({"json_object": True}, {"response_format": {"type": "json_object"}}),
        ({"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        (
            {"json_schema": {}, "whitespace_pattern": " ?"},
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}},
        ),
    ],
)
def test_shapes_are_spelled_as_servers_do(stub: StubApi, shape: dict[str, Any], sent: dict[str, Any]) -> None:
    stub.stream(chunk({"content": "a"}, "stop"))
    list(partner(stub).answer(TALK, {"structured": shape}, ()))
    body = stub.asked[0]
    assert {name: body[name] for name in body if name in ("structured", *sent)} == sent


def test_what_it_says_of_itself(stub: StubApi) -> None:
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
def test_answers_that_are_none(stub: StubApi, status: int, data: bytes, error: type[Exception], words: str) -> None:
    found = partner(stub)
    stub.answers = [(status, data)]
    with pytest.raises(error, match=words):
        list(found.answer(TALK, {}, ()))


@pytest.mark.parametrize(
    ("models", "words"), [({"data": []}, "has no model"), ([], "does not list"), ({"data": [{}]}, "does not list")]
)
def test_a_server_without_models(stub: StubApi, models: Any, words: str) -> None:
    stub.models = models
    with pytest.raises(ServerUnreachable, match=words):
        partner(stub)


def test_wrong_addresses(stub: StubApi) -> None:
    with pytest.raises(ConfigError, match="has no model 'three'; it has one, two"):
        partner(stub, model="three")
    with pytest.raises(ServerUnreachable, match="refused"):
        RemotePartner("http://127.0.0.1:1")
    for url in ("127.0.0.1:8000", "ftp://x", "http://", "http://x:99999999"):
        with pytest.raises(ConfigError, match="--url"):
            RemotePartner(url)
