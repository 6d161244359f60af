"""Tools from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from gapless.chat.tool_file import read_tools
from gapless.errors import InvalidRequest


def test_both_spellings(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text('[{"name": "a", "parameters": {}}, {"type": "function", "function": {"name": "b"}}]')
    tools = read_tools(str(path))
    assert tools == [
        {"type": "function", "function": {"name": "a", "parameters": {}}},
        {"type": "function", "function": {"name": "b"}},
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", "must be a list of tools"),
        ("[]", "must be a list of tools"),
        ("[1]", "tool 1 needs a name"),
        ('[{"name": "a b"}]', "tool 1 needs a name"),
        ('[{"name": "a"}, {"function": {"name": 7}}]', "tool 2 needs a name"),
        ('[{"name": "a", "parameters": []}]', "tool 1: parameters must be"),
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
