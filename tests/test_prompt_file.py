"""Prompt files as people and their editors write them."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path

import pytest

from gapless.errors import InvalidRequest
from gapless.prompt_file import BadLine, Line, read_lines, read_prompts, read_text

NOTHING = io.BytesIO()


def parse(text: str) -> list[Line | BadLine]:
    return list(read_lines(io.BytesIO(text.encode())))


def test_good_lines() -> None:
    text = '{"prompt": "a", "id": "x", "top_k": 3}\n\n{"messages": [], "id": 7}\n{"prompt": [1, 2]}\n'
    first, second, third = parse(text)
    assert first == Line(0, "x", "a", None, {"top_k": 3})
    assert second == Line(1, 7, None, [], {})
    assert third == Line(2, 2, [1, 2], None, {})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a"', "line 1: not JSON"),
        ('["prompt"]', "must be an object, got list"),
        ("[" * 100_000, "line 1: not JSON that can be read"),
        ('{"prompt": "a", "seed": ' + "1" * 5000 + "}", "line 1: not JSON that can be read"),
        ('{"id": "x"}', "either 'prompt' or 'messages'"),
        ('{"prompt": "a", "messages": []}', "either 'prompt' or 'messages'"),
        ('{"prompt": "a", "id": [1]}', "id must be text or a whole number, got [1]"),
    ],
)
def test_bad_lines_say_why(line: str, words: str) -> None:
    (found,) = parse(line)
    assert isinstance(found, BadLine)
    assert words in found.error


def test_only_line_feeds_end_a_line() -> None:
    """U+2028 and U+0085 end a line for str.splitlines, but not in JSON Lines."""
    (found,) = parse('{"prompt": "a\u2028b\u0085c"}')
    assert isinstance(found, Line)
    assert found.prompt == "a\u2028b\u0085c"


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_a_byte_order_mark_and_carriage_returns_are_accepted(source: str, tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n'
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    found = read_prompts(str(path) if source == "file" else "-", io.BytesIO(data))
    assert found.lines == (Line(0, 0, "a", None, {}), Line(1, 1, "b", None, {}))
    assert read_text("-", io.BytesIO(b"\xef\xbb\xbfa")) == "a"


def test_prompts_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such file"):
        read_prompts(str(tmp_path / "none.jsonl"), NOTHING)
    with pytest.raises(InvalidRequest, match="Is a directory"):
        read_prompts(str(tmp_path), NOTHING)
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(InvalidRequest, match="no prompts"):
        read_prompts(str(tmp_path / "empty"), NOTHING)
    with pytest.raises(InvalidRequest, match="standard input: no prompts"):
        read_prompts("-", NOTHING)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match="UTF-8"):
        read_prompts(str(tmp_path / "binary"), NOTHING)
    with pytest.raises(InvalidRequest, match="UTF-8"):
        read_text("-", io.BytesIO(b"\xff"))


def test_a_fingerprint_is_of_content_and_settings(tmp_path: Path) -> None:
    one, other = b'{"prompt": "a"}\n', b'{"prompt": "b"}\n'
    (tmp_path / "one").write_bytes(one)
    named, piped = read_prompts(str(tmp_path / "one"), NOTHING), read_prompts("-", io.BytesIO(one))
    assert named.fingerprint({"model": "m"}) == piped.fingerprint({"model": "m"})
    assert named.fingerprint({"model": "m"}) != named.fingerprint({"model": "n"})
    assert named.fingerprint({}) != read_prompts("-", io.BytesIO(other)).fingerprint({})


def test_memory_is_bounded_by_the_prompts(tmp_path: Path) -> None:
    """The raw text is not kept, and a line being read exists in a few copies: bytes, text, prompt."""
    size = 8 << 20
    path = tmp_path / "in.jsonl"
    path.write_bytes((b'{"prompt": "' + b"x" * size + b'"}\n') * 3)
    tracemalloc.start()
    try:
        found = read_prompts(str(path), NOTHING)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.lines) == 3
    assert kept < 3.1 * size
    assert peak < 6.5 * size
