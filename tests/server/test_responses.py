"""`/v1/responses` against the types of the `openai` package and the fields that the Open Responses schema requires."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from servers import Server, eventually, running

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
REQUIRED = frozenset(
    [
        "id",
        "object",
        "created_at",
        "completed_at",
        "status",
        "incomplete_details",
        "model",
        "previous_response_id",
        "instructions",
        "output",
        "error",
        "tools",
        "tool_choice",
        "truncation",
        "parallel_tool_calls",
        "text",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "top_logprobs",
        "temperature",
        "reasoning",
        "usage",
        "max_output_tokens",
        "max_tool_calls",
        "store",
        "background",
        "service_tier",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
    ]
)
ASKED: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {
            "id": "msg_1",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "More"},
    ],
    "instructions": "Be brief",
    "temperature": 2,
    "top_p": 0.5,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "metadata": {"a": "b"},
    "user": "me",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "max_tool_calls": 3,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
}


def check(response: dict[str, Any]) -> Response:
    assert response.keys() >= REQUIRED
    return Response.model_validate(response, strict=True)


def check_events(data: bytes) -> list[dict[str, Any]]:
    events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]
    for event in events:
        EVENT.validate_python(event)
        if "response" in event:
            check(event["response"])
    return events


@pytest.mark.parametrize("body", [{"input": "Hello"}, ASKED], ids=["bare", "all"])
def test_every_field_and_event_is_as_the_schema_says(server: Server, body: dict[str, Any]) -> None:
    body = body | {"max_output_tokens": 4, "ignore_eos": True}
    response = json.loads(server.send("POST", "/v1/responses", body)[1])
    found = check(response)
    assert (found.status, found.completed_at) == ("incomplete", None)
    events = check_events(server.send("POST", "/v1/responses", body | {"stream": True})[1])
    assert events[-1]["type"] == "response.incomplete"
    for name in body.keys() & response.keys() - {"input"}:
        assert response[name] == body[name], name


def test_a_completed_response_says_when(server: Server) -> None:
    bodies = [{"input": "a", "seed": seed, "temperature": 2} for seed in range(20)]
    answers = (check(json.loads(server.send("POST", "/v1/responses", body)[1])) for body in bodies)
    found = next(answer for answer in answers if answer.status == "completed")
    assert found.completed_at is not None
    assert found.completed_at >= found.created_at


def test_a_failed_stream_is_as_the_schema_says(faulty: Server) -> None:
    body = {"input": "a", "ignore_eos": True, "timeout": 0.05, "stream": True}
    events = check_events(faulty.send("POST", "/v1/responses", body)[1])
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_can_be_read_again_until_it_is_deleted(client: openai.OpenAI, stream: bool) -> None:
    question: dict[str, Any] = {"model": "tiny", "input": "Hello", "max_output_tokens": 4}
    if stream:
        made = list(client.responses.create(**question, stream=True))[-1].response
    else:
        made = client.responses.create(**question)
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    client.responses.delete(made.id)
    for gone in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="not here"):
            gone(made.id)
    with pytest.raises(openai.NotFoundError, match="not here"):
        client.responses.create(**question, previous_response_id=made.id)


def test_what_is_not_kept_cannot_be_read(client: openai.OpenAI, server: Server) -> None:
    made = client.responses.create(model="tiny", input="Hello", max_output_tokens=2, store=False)
    with pytest.raises(openai.NotFoundError, match="not here"):
        client.responses.retrieve(made.id)
    kept = client.responses.create(model="tiny", input="Hello", max_output_tokens=2)
    assert server.error("GET", f"/v1/responses/{kept.id}?stream=true")[1]["param"] == "stream"


def test_without_a_limit_the_servers_default_ends_an_answer(tmp_path: Path, long_dir: Path) -> None:
    """Chats and responses say so, and so do the log and a metric; a completion has a default of its own."""
    with running(tmp_path / "log", long_dir, "--num-blocks", "128", "--default-max-tokens", "24") as server:
        talk = [{"role": "user", "content": "Hello"}]
        chat = json.loads(server.send("POST", "/v1/chat/completions", {"messages": talk, "ignore_eos": True})[1])
        assert (chat["choices"][0]["finish_reason"], chat["usage"]["completion_tokens"]) == ("length", 24)
        found = check(json.loads(server.send("POST", "/v1/responses", {"input": "Hello", "ignore_eos": True})[1]))
        assert found.status == "incomplete"
        assert found.incomplete_details is not None
        assert found.incomplete_details.reason == "max_output_tokens"
        assert found.usage is not None
        assert found.usage.output_tokens == 24
        own = {"messages": talk, "ignore_eos": True, "max_tokens": 24}
        assert server.send("POST", "/v1/chat/completions", own)[0] == 200
        assert server.metric("gapless_default_limit_total") == 2
        lines = eventually(lambda: [line for line in server.lines() if "default_max_tokens" in line["message"]], server)
        assert len(lines) == 2
