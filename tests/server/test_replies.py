"""Reasoning and calls of tools in answers: whole and streamed ones say the same, in chats and in responses."""

from __future__ import annotations

from typing import Any

import pytest
from flights import EOS, TALK, TOKENIZER, play
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gapless.server.protocol import ChatRequest, ResponsesRequest
from gapless.server.replies import ReplyPlan
from gapless.server.tools import chat_tools
from gapless.text.reasoning import find_reasoning
from gapless.text.reply import ReplyFormat
from gapless.text.tools.find import find_format

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é😀"}}\n</tool_call>'
TEXTS = [
    "Hello",
    "",
    CALL,
    f"<think>Hm.</think>Wait.\n{CALL}\n{CALL.replace('f', 'g', 1)}",
    "<think>Only thoughts",
    f"{CALL} and more",
    CALL[:40],
]


def replies(choice: Any = "auto", **options: Any) -> ReplyPlan:
    format = ReplyFormat(find_format(None, "hermes"), find_reasoning(None, lambda tag: False, "think"))
    return ReplyPlan(format, chat_tools(TOOLS, choice, None), (), is_reasoning=False, **options)


def tokens_of(text: str, size: int) -> list[list[int]]:
    tokens = TOKENIZER.encode(text)
    return [*(tokens[start : start + size] for start in range(0, len(tokens), size)), [EOS]]


def chat(text: str, size: int, plan: ReplyPlan, reason: str = "stop") -> dict[str, Any]:
    """A message as the openai package puts it together from a stream, and its finish reason."""
    state = ChatCompletionStreamState()
    chunks = play(ChatRequest(messages=TALK, stream=True), tokens_of(text, size), reason, replies=plan)
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    reasoning = "".join(c["choices"][0]["delta"].get("reasoning_content", "") for c in chunks)
    choice = state.current_completion_snapshot.choices[0].model_dump()
    return told(choice["message"] | {"reasoning_content": reasoning}, choice["finish_reason"])


def told(message: dict[str, Any], reason: str) -> dict[str, Any]:
    """Without ids, which are random."""
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    reasoning = message.get("reasoning_content") or ""
    return {"content": message["content"] or "", "reasoning": reasoning, "calls": calls, "reason": reason}


def whole_chat(text: str, plan: ReplyPlan, reason: str = "stop") -> dict[str, Any]:
    answer = play(ChatRequest(messages=TALK), tokens_of(text, 1000), reason, replies=plan)
    ChatCompletion.model_validate(answer)
    return told(answer["choices"][0]["message"], answer["choices"][0]["finish_reason"])


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_streamed_chat_is_the_whole_one(text: str, reason: str) -> None:
    whole = whole_chat(text, replies(), reason)
    for size in (1, 3, 1000):
        assert chat(text, size, replies(), reason) == whole


def test_a_chat_tells_reasoning_content_and_calls() -> None:
    found = whole_chat(TEXTS[3], replies())
    arguments = '{"a": "é😀"}'
    calls = [("f", arguments), ("g", arguments)]
    assert found == {"content": "Wait.", "reasoning": "Hm.", "calls": calls, "reason": "tool_calls"}
    assert whole_chat(CALL, replies({"type": "function", "function": {"name": "f"}}))["reason"] == "stop"
    assert whole_chat(CALL, replies(), "length")["reason"] == "length"
    assert whole_chat(CALL, replies("none"))["content"] == CALL
    assert whole_chat(TEXTS[3], replies(shows_reasoning=False))["reasoning"] == ""
    assert chat(TEXTS[3], 3, replies(shows_reasoning=False))["reasoning"] == ""


def test_a_message_with_nothing_but_calls_has_no_content() -> None:
    answer = play(ChatRequest(messages=TALK), tokens_of(CALL, 1000), "stop", replies=replies())
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["id"].startswith("call_")


def response(text: str, size: int, reason: str, *, stream: bool) -> tuple[list[Any], Any]:
    body = ResponsesRequest(input="Hello", stream=stream, tools=FLAT)
    found = play(body, tokens_of(text, size), reason, replies=replies(), logprobs=None)
    events = [EVENT.validate_python(event) for event in found] if stream else []
    return events, Response.model_validate(found[-1]["response"] if stream else found)


def items(found: Response) -> list[dict[str, Any]]:
    return [item.model_dump(exclude={"id", "call_id"}) for item in found.output]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_streamed_response_is_the_whole_one(text: str, reason: str) -> None:
    _, whole = response(text, 1000, reason, stream=False)
    assert whole.status == ("completed" if reason == "stop" else "incomplete")
    for size in (1, 3, 1000):
        events, streamed = response(text, size, reason, stream=True)
        assert items(streamed) == items(whole)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        _check_events(events, streamed)


def _check_events(events: list[Any], found: Response) -> None:
    """Every item is announced, told in deltas that add up to it, and closed as it stands in the response."""
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in added] == [item.id for item in done] == [item.id for item in found.output]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in found.output]
    for index, item in enumerate(found.output):
        deltas = [e.delta for e in events if e.type.endswith(".delta") and e.output_index == index]
        own = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(deltas) == own


def test_a_response_has_an_item_for_each_part() -> None:
    _, found = response(TEXTS[3], 3, "stop", stream=True)
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call", "function_call"]
    call: Any = found.output[2]
    assert (call.name, call.arguments, call.status) == ("f", '{"a": "é😀"}', "completed")
    _, cut = response(CALL[:40], 3, "length", stream=True)
    assert [(item.type, item.status) for item in cut.output] == [("function_call", "incomplete")]  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_usage_counts_the_tokens_of_the_reasoning(size: int) -> None:
    """Up to the token that completes the tag, in whole and streamed answers of both kinds."""
    wanted = len(TOKENIZER.encode("<think>Hm.</think>"))
    tokens = tokens_of(TEXTS[3], size)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    whole = play(ChatRequest(messages=TALK), tokens, "stop", replies=replies())
    chunks = play(ChatRequest(messages=TALK, stream=True, stream_options=options), tokens, "stop", replies=replies())
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": wanted}
    assert counts[-1] == wanted
    assert counts == sorted(counts)
    for stream in (False, True):
        _, found = response(TEXTS[3], size, "stop", stream=stream)
        assert found.usage is not None
        assert found.usage.output_tokens_details.reasoning_tokens == wanted
