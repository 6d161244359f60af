"""Tools and earlier calls as clients send them: what is read, and what is refused by its path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gapless.errors import ConfigError
from gapless.server.conversation import chat_talk, turns
from gapless.server.errors import ApiError
from gapless.server.history import told_reply
from gapless.server.options import ServerOptions
from gapless.server.protocol import MessageBody
from gapless.server.run import read_template
from gapless.server.tools import MAX_TOOLS, chat_tools, response_tools
from gapless.text.deltas import ToolCall, WholeReply
from gapless.text.tools.schema import MAX_SCHEMAS

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOLD = {"role": "tool", "tool_call_id": "c1", "content": "rain"}


def function(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def flat(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, **more}


def schema(**more: Any) -> list[dict[str, Any]]:
    return [function(parameters={"type": "object", **more})]


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        found = {"type": "array", "items": found}
    return found


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """A tool_choice as chats have it."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([function(5)], None, "tools.0.function.name"),
        ([function("a b")], None, "tools.0.function.name"),
        ([function("x" * 65)], None, "tools.0.function.name"),
        ([function("a"), function("b"), function("a")], None, "tools.2.function.name"),
        ([{"type": "function"}], None, "tools.0.function"),
        ([{"type": "web_search"}], None, "tools.0.type"),
        ([{"type": "custom", "custom": {"name": "f"}}], None, "tools.0.type"),
        ([function() | {"extra": 1}], None, "tools.0.extra"),
        ([function(stric=True)], None, "tools.0.function.stric"),
        ([function(strict=1)], None, "tools.0.function.strict"),
        ([function(description=1)], None, "tools.0.function.description"),
        ([function(f"f{n}") for n in range(MAX_TOOLS + 1)], None, "tools"),
        ([function(parameters=[])], None, "tools.0.function.parameters"),
        ([function(parameters={"type": "string"})], None, "tools.0.function.parameters.type"),
        (schema(properties=[]), None, "tools.0.function.parameters.properties"),
        (schema(properties={"a": 5}), None, "tools.0.function.parameters.properties.a"),
        (schema(properties={"a": {"type": "strin"}}), None, "tools.0.function.parameters.properties.a.type"),
        (schema(properties={"a": {"type": {}}}), None, "tools.0.function.parameters.properties.a.type"),
        (schema(properties={"a": {"enum": []}}), None, "tools.0.function.parameters.properties.a.enum"),
        (schema(properties={"a": {"$ref": "#/$defs/b"}}), None, "tools.0.function.parameters.properties.a.$ref"),
        (
            schema(properties={"a": {"anyOf": [{"minLength": -1}]}}),
            None,
            "tools.0.function.parameters.properties.a.anyOf.0.minLength",
        ),
        (schema(required="a"), None, "tools.0.function.parameters.required"),
        (schema(properties={"a": {"maximum": "9"}}), None, "tools.0.function.parameters.properties.a.maximum"),
        (schema(properties={"a": nested(1000)}), None, "tools.0.function.parameters.properties.a"),
        (schema(properties={f"p{n}": {} for n in range(MAX_SCHEMAS)}), None, "tools.0.function.parameters"),
        (schema(properties={"x" * 5000: {"type": "no"}}), None, "tools.0.function.parameters.properties.xxx"),
        ([function()], "sometimes", "tool_choice"),
        ([function()], {"type": "function", "function": {"name": "g"}}, "tool_choice.function.name"),
        ([function()], {"type": "function", "function": "f"}, "tool_choice.function.name"),
        ([function()], {"type": "allowed_tools"}, "tool_choice.mode"),
        ([function()], {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}, "tool_choice.allowed_tools.tools"),
        ([function()], allowed("auto"), "tool_choice.allowed_tools.tools"),
        ([function()], allowed("auto", "f", "g"), "tool_choice.allowed_tools.tools.1"),
        ([function()], allowed("none", "f"), "tool_choice.allowed_tools.mode"),
        (None, "required", "tool_choice"),
        ([], {"type": "function", "function": {"name": "f"}}, "tool_choice.function.name"),
    ],
)
def test_wrong_tools_are_refused_by_their_path(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_tools(tools, choice, None)
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith(param)
    assert len(caught.value.message) < 1000


def test_responses_name_their_own_paths() -> None:
    for tools, choice, param in (
        ([flat(5)], None, "tools.0.name"),
        ([flat("a"), flat("a")], None, "tools.1.name"),
        ([flat(parameters={"type": "array"})], None, "tools.0.parameters.type"),
        ([flat()], {"type": "function", "name": "g"}, "tool_choice.name"),
        ([{"type": "file_search"}], None, "tools.0.type"),
    ):
        with pytest.raises(ApiError) as caught:
            response_tools(tools, choice, None)
        assert caught.value.param == param
    assert response_tools([flat(strict=True)], {"type": "function", "name": "f"}, True).only == "f"


def test_which_tools_are_told_and_which_may_be_called() -> None:
    tools = [function("f", parameters=CITY, description="Weather"), function("g")]

    def found(choice: Any, **options: Any) -> tuple[str, list[str], list[str], bool]:
        box = chat_tools(tools, choice, options.get("parallel"))
        return box.mode, [t.name for t in box.offered], [t.name for t in box.callable], box.needs_grammar

    assert found(None) == found("auto") == ("auto", ["f", "g"], ["f", "g"], False)
    assert found("none") == ("none", [], [], False)
    assert found("required") == ("required", ["f", "g"], ["f", "g"], True)
    assert found(None, parallel=False) == ("auto", ["f", "g"], ["f", "g"], True)
    assert found({"type": "function", "function": {"name": "g"}}) == ("required", ["f", "g"], ["g"], True)
    assert found(allowed("auto", "g")) == ("auto", ["f", "g"], ["g"], True)
    assert found(allowed("required", "g", "f")) == ("required", ["f", "g"], ["f", "g"], True)
    responses = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    assert [tool.name for tool in response_tools([flat("e"), flat("f")], responses, None).callable] == ["f"]
    assert chat_tools([function(strict=True)], None, None).needs_grammar
    described = chat_tools(tools, None, None).tools[0].described()
    assert described == {"type": "function", "function": {"name": "f", "description": "Weather", "parameters": CITY}}
    assert chat_tools([], "auto", None).mode == "none"


def talk_of(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return chat_talk([MessageBody.model_validate(message) for message in messages], "{{ messages }}")


def test_earlier_calls_are_told_as_templates_expect_them() -> None:
    asked, told = talk_of(ASKED, TOLD)
    assert asked["tool_calls"][0]["function"] == {"name": "f", "arguments": {"city": "Oslo"}}
    assert (told["tool_call_id"], told["name"], told["content"]) == ("c1", "f", "rain")
    again = talk_of(ASKED, TOLD, ASKED, TOLD)
    assert again[2:] == again[:2], "an id may come again once it has its result"
    assert talk_of({"role": "assistant", "content": "a", "reasoning_content": "b"})[0]["reasoning_content"] == "b"


def with_call(**changes: Any) -> dict[str, Any]:
    return ASKED | {"tool_calls": [CALL | changes]}


def with_function(**changes: Any) -> dict[str, Any]:
    return with_call(function={"name": "f", "arguments": "{}"} | changes)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([TOLD], "messages.0.tool_call_id"),
        ([ASKED, TOLD | {"tool_call_id": "c2"}], "messages.1.tool_call_id"),
        ([ASKED, {"role": "tool", "content": "rain"}], "messages.1.tool_call_id"),
        ([ASKED, TOLD, TOLD], "messages.2.tool_call_id"),
        ([ASKED | {"tool_calls": [CALL, CALL]}], "messages.0.tool_calls.1.id"),
        ([with_call(id="")], "messages.0.tool_calls.0.id"),
        ([with_call(id=5)], "messages.0.tool_calls.0.id"),
        ([with_call(type="custom")], "messages.0.tool_calls.0"),
        ([with_call(extra=1)], "messages.0.tool_calls.0.extra"),
        ([with_function(name="a b")], "messages.0.tool_calls.0.function.name"),
        ([with_function(arguments="{")], "messages.0.tool_calls.0.function.arguments"),
        ([with_function(arguments="[1]")], "messages.0.tool_calls.0.function.arguments"),
        ([with_function(arguments={})], "messages.0.tool_calls.0.function.arguments"),
        ([with_function(arguments="[" * 99999)], "messages.0.tool_calls.0.function.arguments"),
        ([with_function(args="{}")], "messages.0.tool_calls.0.function.args"),
        ([ASKED | {"tool_calls": {"a": 1}}], "messages.0.tool_calls"),
        ([ASKED | {"role": "user"}], "messages.0.tool_calls"),
        ([ASKED, TOLD | {"role": "user"}], "messages.1.tool_call_id"),
        ([{"role": "assistant", "content": "", "function_call": {"name": "f"}}], "messages.0.function_call"),
    ],
)
def test_wrong_calls_in_earlier_turns_are_refused_by_their_path(messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        talk_of(*messages)
    assert (caught.value.status, caught.value.param) == (400, param)


CALLED = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "c1",
    "name": "f",
    "arguments": '{"a": 1}',
    "status": "completed",
}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def test_items_of_one_turn_are_one_message() -> None:
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]}
    more = CALLED | {"call_id": "c2"}
    found = turns([{"role": "user", "content": "Hi"}, THOUGHT, said, CALLED, more, OUTPUT], [])
    assert [turn["role"] for turn in found] == ["user", "assistant", "tool"]
    assert found[1]["content"] == "Wait."
    assert found[1]["reasoning_content"] == "hm"
    assert [call["id"] for call in found[1]["tool_calls"]] == ["c1", "c2"]
    assert found[2] == {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "rain"}


def test_a_result_may_answer_a_call_of_the_stored_response() -> None:
    earlier = [told_reply(WholeReply(calls=[ToolCall("c1", "f", '{"a": 1}')]))]
    assert turns([OUTPUT], earlier)[0]["name"] == "f"
    with pytest.raises(ApiError) as caught:
        turns([OUTPUT, OUTPUT], earlier)
    assert caught.value.param == "input.1.call_id"


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([OUTPUT], "input.0.call_id"),
        ([CALLED | {"call_id": None}], "input.0.call_id"),
        ([CALLED | {"arguments": "no"}], "input.0.arguments"),
        ([CALLED | {"name": ""}], "input.0.name"),
        ([CALLED | {"size": 1}], "input.0.size"),
        ([CALLED, OUTPUT | {"output": 5}], "input"),
        ([{"type": "item_reference", "id": "x"}], "input"),
        ([{"type": "web_search_call"}], "input"),
    ],
)
def test_wrong_items_are_refused_by_their_path(items: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        turns(items, [])
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("options", [{"tool_format": "xml"}, {"reasoning_format": "thonk"}])
def test_an_unknown_format_is_refused_at_the_start(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerOptions(**options)


def test_a_chat_template_of_the_operator(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chat_template"):
        read_template(str(tmp_path / "none"))
    (tmp_path / "t").write_text("{{ messages }}é", "utf-8")
    assert read_template(str(tmp_path / "t")) == "{{ messages }}é"
    (tmp_path / "t").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="chat_template"):
        read_template(str(tmp_path / "t"))
