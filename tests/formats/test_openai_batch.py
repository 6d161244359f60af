"""OpenAI batches on the tiny model: what clients read from the results, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion

from gapless.cli import main
from gapless.formats.base import BadLine, Line, Row
from gapless.formats.openai_batch import BatchRows
from gapless.formats.seen_ids import SeenIds

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
        undisturbed = (folder / "out.jsonl").read_bytes()
        lines = part.read_bytes().splitlines(keepends=True)
        part.write_bytes(b"".join(lines[:3]) + lines[3][:20])
        assert run(folder, tiny_dir) == 1
    assert (folder / "out.jsonl").read_bytes() == undisturbed


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
        ({"url": CHATS, "body": {"messages": HELLO, "tools": [{}]}}, "body.tools is not supported"),
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
