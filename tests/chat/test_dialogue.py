"""Messages of a conversation: taken back, saved, loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gapless.chat.dialogue import Dialogue, load, save
from gapless.errors import InvalidRequest, OutputError
from gapless.formats.base import Line
from gapless.prompt_file import read_lines


def talk(*contents: str, system: str | None = None) -> Dialogue:
    dialogue = Dialogue(system)
    for index, content in enumerate(contents):
        dialogue.add({"role": ("user", "assistant")[index % 2], "content": content})
    return dialogue


def contents(dialogue: Dialogue) -> list[str]:
    return [message["content"] for message in dialogue.messages]


def test_the_system_message_comes_first_and_stays() -> None:
    dialogue = talk("a", "b", system="s")
    assert contents(dialogue) == ["s", "a", "b"]
    dialogue.forget()
    assert contents(dialogue) == ["s"]


def test_taking_back() -> None:
    dialogue = talk("a", "b", "c", "d")
    assert dialogue.take_back_answer()
    assert contents(dialogue) == ["a", "b", "c"]
    assert dialogue.take_back_question()
    assert contents(dialogue) == ["a", "b"]
    assert dialogue.take_back_question()
    assert not dialogue.take_back_question()
    assert not dialogue.take_back_answer()


def test_a_tool_call_and_its_result_belong_to_the_answer() -> None:
    dialogue = talk("a", "calls")
    dialogue.add({"role": "tool", "content": "7", "tool_call_id": "x"})
    dialogue.add({"role": "assistant", "content": "seven"})
    assert dialogue.take_back_answer()
    assert contents(dialogue) == ["a"]


@pytest.mark.parametrize("system", [None, "bréf"])
def test_a_saved_conversation_is_a_line_of_a_prompt_file(tmp_path: Path, system: str | None) -> None:
    path = tmp_path / "talk.jsonl"
    save(str(path), talk("é\n東", "b", system=system), {"temperature": 0.5})
    (line,) = read_lines(path.read_bytes().splitlines())
    assert isinstance(line, Line)
    assert line.params == {"temperature": 0.5}
    dialogue, params = load(str(path))
    assert dialogue.messages == talk("é\n東", "b", system=system).messages
    assert dialogue.system == system
    assert params == {"temperature": 0.5}


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nothing to save"):
        save(str(tmp_path / "a"), Dialogue(), {})
    with pytest.raises(OutputError, match="cannot be written: No such file"):
        save(str(tmp_path / "none" / "a"), talk("a"), {})
    with pytest.raises(OutputError, match="cannot be written: Is a directory"):
        save(str(tmp_path), talk("a"), {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no prompts"),
        ("{broken", "not JSON"),
        ('{"prompt": "a"}', "has a prompt; a conversation has messages"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\] has no content"),
        ('{"messages": []}', "must not be empty"),
        ('{"messages": [{"role": "user", "content": "a"}], "temprature": 1}', "did you mean 'temperature'"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n' * 2, "has 2 lines"),
    ],
)
def test_what_cannot_be_loaded(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=words):
        load(str(path))


@pytest.mark.parametrize(
    ("path", "words"),
    [("none", "no such file"), ("-", "no such file"), (".", "is not a file"), ("/dev/zero", "is not a file")],
)
def test_what_is_no_file(path: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        load(path)


def test_saving_again_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    save(str(path), talk("a"), {})
    save(str(path), talk("b"), {})
    assert json.loads(path.read_text())["messages"][0]["content"] == "b"
    assert list(tmp_path.iterdir()) == [path]
