"""Tools from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gapless.chat.tool_file import read_tools
from gapless.errors import InvalidRequest
from gapless.text.tools.base import Tool


def test_both_spellings(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    whole = {"type": "function", "function": {"name": "b", "description": "B", "strict": True}}
    path.write_text(json.dumps([{"name": "a", "parameters": {"type": "object", "required": ["x"]}}, whole]))
    empty = {"type": "object", "properties": {}}
    assert read_tools(str(path)) == (
        Tool("a", {"type": "object", "required": ["x"]}),
        Tool("b", empty, "B", strict=True),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("{}", "must be a list of tools"),
        ("[]", "must be a list of tools"),
        ("[1]", "tool 1 must be an object"),
        ('[{"name": "a b"}]', "tool 1 needs a name"),
        ('[{"name": "a"}, {"function": {"name": 7}}]', "tool 2: name is wrong"),
        ('[{"name": "a", "parameters": []}]', "tool 1: parameters is wrong"),
        ('[{"name": "a", "colour": "red"}]', "colour is wrong; a tool has name, description"),
        ('[{"name": "a", "parameters": {"properties": {"x": {"type": "y"}}}}]', "tool 1: parameters.properties.x.type"),
        ('[{"name": "a"}, {"name": "a"}]', "two tools have the same name"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "tools.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=words):
        read_tools(str(path))
    with pytest.raises(InvalidRequest, match="No such file"):
        read_tools(str(tmp_path / "none"))
    with pytest.raises(InvalidRequest, match="is not a file"):
        read_tools("/dev/zero")
