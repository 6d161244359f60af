"""Several lines as one message, and lines that are no text."""

from __future__ import annotations

import io
import sys

import pytest
from partners import ListedLines

from gapless.chat.lines import PipedLines, read_message
from gapless.errors import InvalidRequest


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["hello"], "hello"),
        (["one\\", "two"], "one\ntwo"),
        (["one\\", "\\", "three"], "one\n\nthree"),
        (["one\\"], "one\\"),
        (['"""one"""'], "one"),
        (['"""', "one", "", "two", '"""'], "one\n\ntwo"),
        (['"""one', 'two"""  '], "one\ntwo"),
        (['"""one', "two"], "one\ntwo"),
        (['/system """one', 'two"""'], "/system one\ntwo"),
        (['say """x""" twice'], 'say """x""" twice'),
        ([], None),
    ],
)
def test_a_message_may_have_several_lines(lines: list[str], message: str | None) -> None:
    assert read_message(ListedLines(*lines), "> ") == message


def test_the_rest_is_left_for_the_next_message() -> None:
    lines = ListedLines("a\\", "b", '"""c', 'd"""', "e")
    assert [read_message(lines, "> ") for _ in range(4)] == ["a\nb", "c\nd", "e", None]
    assert lines.prompts == ["> ", "... ", "> ", "... ", "> ", "> "]


def test_a_pipe_is_utf8_whatever_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO("\ufeffdéjà\r\n東京\n".encode() + b"\xff\nlast")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw, encoding="ascii"))
    lines = PipedLines()
    assert [lines.read(""), lines.read("")] == ["déjà", "東京"]
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        lines.read("")
    assert [lines.read(""), lines.read("")] == ["last", None]
