"""OpenAI batches on the tiny model: what clients read from the results, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion

from gapless.cli import main
from gapless.formats.base import BadLine, Line, Row
from gapless.formats.openai_batch import BatchRows
from gapless.formats.seen_ids import SeenIds
from tiny import write_tool_model

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def row(name: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


ROWS = [
    row("talk", CHATS, model="tiny", messages=HELLO, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2),
    row("text", COMPLETIONS, prompt="Hello", n=2, logprobs=1, max_tokens=4, seed=7),
    row("ids", COMPLETIONS, prompt=[5, 6, 7], return_token_ids=True),
    row("bad", COMPLETIONS, prompt="Hello", temperature=9),
    row("other", CHATS, model="gpt-4o", messages=HELLO),
    row("shape", CHATS, messages=HELLO, max_tokens=5, structured_outputs={"choice": ["yes", "no"]}),
]


def run(folder: Path, model: Path, *more: str, out: str = "out.jsonl") -> int:
    options = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--num-blocks", "64"]
    names = ["--served-model-name", "tiny"]
    return main(["run", str(folder / "in.jsonl"), "-o", str(folder / out), *options, *names, *more])


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def told(path: Path) -> list[Any]:
    """Results without the number of cached tokens, which depends on what ran before."""
    found = read(path)
    for each in found:
        each["response"]["body"].get("usage", {}).pop("prompt_tokens_details", None)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ROWS) + "nonsense\n")
    return tmp_path


def test_results_are_those_of_openai(folder: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, tiny_dir) == 1
    found = read(folder / "out.jsonl")
    assert all(list(each) == ["id", "custom_id", "response", "error"] for each in found)
    assert [each["custom_id"] for each in found] == [*(each["custom_id"] for each in ROWS), None]
    assert len({each["id"] for each in found}) == len(found)
    assert [each["response"]["status_code"] for each in found] == [200, 200, 200, 400, 400, 200, 400]
    talk, text, ids, bad, other, shape, nonsense = found
    chat = ChatCompletion.model_validate(talk["response"]["body"], strict=True)
    assert chat.model == "tiny"
    assert chat.usage is not None
    assert chat.usage.completion_tokens <= 3
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
    completion = OpenAICompletion.model_validate(text["response"]["body"], strict=True)
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert completion.choices[0].logprobs is not None
    assert "".join(completion.choices[0].logprobs.tokens or ()).startswith(completion.choices[0].text)
    assert ids["response"]["body"]["prompt_token_ids"] == [5, 6, 7]
    assert len(ids["response"]["body"]["choices"][0]["token_ids"]) <= 16, "OpenAI's default"
    assert shape["response"]["body"]["choices"][0]["message"]["content"] in ("yes", "no")
    assert talk["error"] is None
    assert "temperature" in bad["error"]["message"]
    assert bad["response"]["body"]["error"]["message"] == bad["error"]["message"]
    assert "--served-model-name" in other["error"]["message"]
    assert nonsense["error"]["message"].startswith("line 7: not JSON")
    assert [each["custom_id"] for each in read(folder / "out.errors.jsonl")] == ["bad", "other", None]
    assert "error in 'bad'" in capsys.readouterr().err


def test_a_resumed_run_writes_what_an_undisturbed_one_writes(folder: Path, tiny_dir: Path) -> None:
    with patch("time.time", lambda: 1.0):
        assert run(folder, tiny_dir) == 1
        part = folder / "out.jsonl.part"
        undisturbed = told(folder / "out.jsonl")
        lines = part.read_bytes().splitlines(keepends=True)
        part.write_bytes(b"".join(lines[:3]) + lines[3][:20])
        assert run(folder, tiny_dir) == 1
    assert told(folder / "out.jsonl") == undisturbed


def test_a_batch_needs_a_place_for_its_results(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(folder / "in.jsonl"), "--model", "none"]) == 2
    assert "add -o OUT.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "GET"}, "method must be 'POST'"),
        ({"url": "/v1/embeddings"}, "url must be"),
        ({"custom_id": 5}, "custom_id must be text"),
        ({"extra": 1}, "a row of a batch has no 'extra'"),
        ({"body": {"prompt": "a", "temperature": "hot"}}, "body.temperature"),
        ({"body": {"prompt": ["a", "b"]}}, "several prompts"),
        ({"body": {"prompt": "a", "stream": True}}, "body.stream is not supported in files"),
        ({"body": {"prompt": "a", "max_tokens": 0}}, "at least 1"),
        ({"body": {"prompt": "a", "nonsense": 1}}, "nonsense"),
        ({"url": CHATS, "body": {"messages": HELLO, "top_logprobs": 1}}, "needs logprobs"),
        ({"url": CHATS, "body": {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}}, "differ"),
        ({"url": CHATS, "body": {"messages": HELLO, "chat_template_kwargs": {"tools": 1}}}, "parameter of its own"),
        ({"url": CHATS, "body": {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}}, "line 1: "),
    ],
)
def test_rows_that_cannot_run_say_why(change: dict[str, Any], words: str) -> None:
    found = BatchRows(["m"], "run").parse(Row("line 1", row("x", COMPLETIONS, prompt="a") | change), 0)
    assert isinstance(found, BadLine)
    assert words in found.error


def test_a_body_becomes_parameters() -> None:
    rows = BatchRows(["m"], "run")
    found = rows.parse(Row("line 1", row("x", COMPLETIONS, prompt="a", model="m", top_k=-1, stop="b", n=2)), 4)
    assert isinstance(found, Line)
    assert (found.index, found.id, found.prompt) == (4, "x", "a")
    assert found.params == {"top_k": 0, "stop": "b", "n": 2}
    assert found.defaults == {"max_tokens": 16}
    body = {"messages": HELLO, "max_completion_tokens": 9, "continue_final_message": True, "reasoning_effort": "low"}
    found = rows.parse(Row("line 1", row("x", CHATS, **body)), 0)
    assert isinstance(found, Line)
    assert found.messages == HELLO
    assert found.params == {"max_tokens": 9}
    assert found.template == {
        "continue_final_message": True,
        "add_generation_prompt": False,
        "reasoning_effort": "low",
    }


def test_a_custom_id_may_stand_in_one_row_only(tmp_path: Path, tiny_dir: Path) -> None:
    rows = [row(name, COMPLETIONS, prompt="Hello", max_tokens=1) for name in ("a", "b", "a", "c")]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert run(tmp_path, tiny_dir) == 1
    found = read(tmp_path / "out.jsonl")
    assert [each["response"]["status_code"] for each in found] == [200, 200, 400, 200]
    assert found[2]["error"]["message"] == "line 3: an earlier row has the id 'a' too"


def test_many_ids_are_told_apart() -> None:
    seen = SeenIds()
    assert all(seen.add(f"row {number}") for number in range(5000))
    assert not any(seen.add(f"row {number}") for number in range(5000))


def test_tools_work_as_on_the_server(tmp_path: Path) -> None:
    """A call that the grammar demands, one in earlier turns, one that is text, and tools that are refused."""
    (tmp_path / "model").mkdir()
    model = write_tool_model(tmp_path / "model", 2000)
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": {**schema, "additionalProperties": False}}}
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    earlier = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "9"},
    ]
    said = {"structured_outputs": {"choice": ['Hm. <tool_call>{"name": "weather", "arguments": {}}</tool_call>']}}
    named = {"type": "function", "function": {"name": "weather"}}
    rows = [
        row("required", CHATS, messages=HELLO, tools=tools, tool_choice="required", parallel_tool_calls=False, n=2),
        row("named", CHATS, messages=earlier, tools=tools, tool_choice=named, return_token_ids=True),
        row("none", CHATS, messages=HELLO, tools=tools, tool_choice="none", **said),
        row("unknown", CHATS, messages=HELLO, tools=tools, tool_choice={"type": "function", "function": {"name": "x"}}),
        row("bad", CHATS, messages=HELLO, tools=[{"type": "retrieval"}]),
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert run(tmp_path, model, "--max-model-len", "2000", "--max-tokens", "300", "--num-blocks", "400") == 1
    required, known, none, unknown, bad = read(tmp_path / "out.jsonl")
    chat = ChatCompletion.model_validate(required["response"]["body"])
    assert len(chat.choices) == 2
    for choice in chat.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls is not None
        assert len(choice.message.tool_calls) == 1
        found: Any = choice.message.tool_calls[0]
        jsonschema.validate(json.loads(found.function.arguments), schema)
    answer = known["response"]["body"]
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    prompt = "".join(chr(31 + token) for token in answer["prompt_token_ids"])
    assert "<tool_call>weather" in prompt
    assert 'assistant: !weather{"city": "Oslo"}|tool: 9|' in prompt
    assert none["response"]["body"]["choices"][0]["message"]["content"] == said["structured_outputs"]["choice"][0]
    assert unknown["error"]["message"] == "body.tool_choice.function.name: no tool is named 'x'"
    assert "body.tools.0.type is 'retrieval'" in bad["error"]["message"]


def test_reasoning_is_told_apart(tmp_path: Path) -> None:
    """The template opens it, and nothing ends it."""
    (tmp_path / "model").mkdir()
    model = write_tool_model(tmp_path / "model", 2000)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = settings["chat_template"].replace("assistant:", "<think>") + "{# </think> #}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    body: Any = {"messages": HELLO, "max_tokens": 9, "min_tokens": 9, "seed": 1}
    rows = [row("shown", CHATS, **body), row("hidden", CHATS, include_reasoning=False, **body)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert run(tmp_path, model) == 0
    shown, hidden = (each["response"]["body"] for each in read(tmp_path / "out.jsonl"))
    message = shown["choices"][0]["message"]
    assert message["content"] == ""
    assert message["reasoning_content"]
    assert shown["usage"]["completion_tokens_details"] == {"reasoning_tokens": 9}
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": "", "refusal": None}
