"""Calls of tools by a real server, with the openai package: whatever the model is, the grammar makes it call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from servers import MAX_LEN, Server, running

from tiny import write_tool_model

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "stop"}},
]
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
TALK: Any = [{"role": "user", "content": "What is the weather?"}]
SAID: Any = {"structured_outputs": {"choice": ['Hm. <tool_call>{"name": "stop", "arguments": {"a": 1}}</tool_call>']}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = write_tool_model(tmp_path_factory.mktemp("tools"), MAX_LEN)
    with running(tmp_path_factory.mktemp("log") / "log.jsonl", directory, "--served-model-name", "tiny") as found:
        yield found


def check(call: Any) -> None:
    jsonschema.validate(json.loads(call.arguments), CITY if call.name == "weather" else {"type": "object"})


@pytest.mark.parametrize("seed", range(4))
def test_a_named_tool_is_called_as_its_schema_says(client: openai.OpenAI, seed: int) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    asked: Any = {"model": "tiny", "messages": TALK, "tools": TOOLS, "tool_choice": choice, "seed": seed}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "stop"
    assert [call.function.name for call in whole.message.tool_calls or ()] == ["weather"]
    check(whole.message.tool_calls[0].function)  # type: ignore[index, union-attr]
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "stop"
    assert [call.function.arguments for call in streamed.message.tool_calls or ()] == [
        call.function.arguments  # type: ignore[union-attr]
        for call in whole.message.tool_calls or ()
    ]


def test_required_calls_come_in_responses_too(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "Hi", "tools": FLAT, "tool_choice": "required", "max_output_tokens": 300}
    asked |= {"parallel_tool_calls": False, "extra_body": {"seed": 3}}
    whole = client.responses.create(**asked)
    (call,) = whole.output
    assert call.type == "function_call"
    check(call)
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        streamed = stream.get_final_response().output[0]
    assert streamed.type == "function_call"
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    assert "".join(deltas) == call.arguments
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    more = client.responses.create(
        model="tiny", input=[output], previous_response_id=whole.id, max_output_tokens=5, store=False
    )
    assert more.usage is not None
    assert whole.usage is not None
    assert more.usage.input_tokens > 10
    with pytest.raises(openai.BadRequestError, match="waits for a result"):
        client.responses.create(model="tiny", input=[output | {"call_id": "x"}], previous_response_id=whole.id)


def test_without_tools_a_call_is_text(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": TALK, "extra_body": SAID}
    for tools in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = client.chat.completions.create(**asked, **tools).choices[0].message
        assert message.tool_calls is None
        assert message.content == SAID["structured_outputs"]["choice"][0]


def test_strict_tools_leave_the_model_free_not_to_call(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": TALK, "tools": TOOLS, "max_tokens": 20, "seed": 5}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason in ("stop", "length")
    assert choice.message.content


def test_a_response_format_goes_together_with_tools(client: openai.OpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [123]}}}
    asked: Any = {"model": "tiny", "messages": TALK, "tools": TOOLS, "response_format": schema, "max_tokens": 300}
    for seed in range(4):
        choice = client.chat.completions.create(**asked, seed=seed).choices[0]
        if choice.message.tool_calls:
            assert choice.finish_reason == "tool_calls"
            check(choice.message.tool_calls[0].function)  # type: ignore[union-attr]
        else:
            assert choice.message.content == "123"


def test_calls_in_earlier_turns_reach_the_prompt(server: Server) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
    talk = [
        *TALK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    body = {"messages": talk, "tools": TOOLS}
    tokens = json.loads(server.send("POST", "/tokenize", body)[1])["tokens"]
    text = json.loads(server.send("POST", "/detokenize", {"tokens": tokens})[1])["prompt"]
    assert text.startswith("<tool_call>weather<tool_call>stop")
    assert text.endswith('!weather{"city": "Oslo"}|tool: rain|assistant:')


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"tool_choice": "required", "min_tokens": 5}, "min_tokens"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
            "tools",
        ),
        ({"chat_template_kwargs": {"thunk": 1}}, "chat_template_kwargs.thunk"),
        ({"chat_template_kwargs": {"self": 0}}, "chat_template_kwargs.self"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: Server, values: dict[str, Any], param: str) -> None:
    status, error = server.error("POST", "/v1/chat/completions", {"messages": TALK, "tools": TOOLS} | values)
    assert (status, error["param"]) == (400, param)
