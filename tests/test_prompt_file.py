"""Prompt files as people and their editors write them."""

from __future__ import annotations

import io
import os
import threading
import tracemalloc
from pathlib import Path

import pytest

from gapless.errors import InvalidRequest
from gapless.formats.base import BadLine, Line
from gapless.prompt_file import read_lines, read_prompts, read_text

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
    found = read_prompts([str(path) if source == "file" else "-"], io.BytesIO(data))
    assert tuple(found.lines()) == (Line(0, 0, "a", None, {}), Line(1, 1, "b", None, {}))
    assert read_text("-", io.BytesIO(b"\xef\xbb\xbfa")) == "a"


def test_prompts_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such file"):
        read_prompts([str(tmp_path / "none.jsonl")], NOTHING)
    with pytest.raises(InvalidRequest, match="Is a directory"):
        read_prompts([str(tmp_path)], NOTHING)
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(InvalidRequest, match="no prompts"):
        read_prompts([str(tmp_path / "empty")], NOTHING)
    with pytest.raises(InvalidRequest, match="standard input: no prompts"):
        read_prompts(["-"], NOTHING)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match="UTF-8"):
        read_prompts([str(tmp_path / "binary")], NOTHING)
    with pytest.raises(InvalidRequest, match="UTF-8"):
        read_text("-", io.BytesIO(b"\xff"))


def test_a_digest_is_of_content(tmp_path: Path) -> None:
    one, other = b'{"prompt": "a"}\n', b'{"prompt": "b"}\n'
    (tmp_path / "one").write_bytes(one)
    named, piped = read_prompts([str(tmp_path / "one")], NOTHING), read_prompts(["-"], io.BytesIO(one))
    assert named.digest == piped.digest != read_prompts(["-"], io.BytesIO(other)).digest


def test_several_files_and_patterns_are_one_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b2", "b1", "a", "b[1]"):
        Path(name + ".jsonl").write_text(f'{{"prompt": "{name}"}}\n\nnonsense\n')
    found = list(read_prompts(["a.jsonl", "b?.jsonl", "-"], io.BytesIO(b'{"prompt": "piped"}')).lines())
    assert [line.index for line in found] == list(range(7))
    assert [line.prompt for line in found if isinstance(line, Line)] == ["a", "b1", "b2", "piped"]
    assert isinstance(found[3], BadLine)
    assert found[3].error.startswith("b1.jsonl: line 3: not JSON")
    assert read_prompts(["b[1].jsonl"], NOTHING).files[0].name == "b[1].jsonl", "a file is no pattern"
    with pytest.raises(InvalidRequest, match=r"c\*.jsonl: no file matches"):
        read_prompts(["c*.jsonl"], NOTHING)
    with pytest.raises(InvalidRequest, match=r"b1.jsonl: named twice"):
        read_prompts(["b1.jsonl", "b*.jsonl"], NOTHING)


def test_a_file_that_changes_under_the_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n')
    found = read_prompts([str(path)], NOTHING)
    os.utime(path, ns=(1, 1))
    with pytest.raises(InvalidRequest, match="has changed since the run began"):
        list(found.lines())


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=lambda: fifo.write_text('{"prompt": "a"}\n'))
    writer.start()
    found = read_prompts([str(fifo)], NOTHING)
    writer.join(10)
    assert [line.prompt for line in found.lines() if isinstance(line, Line)] == ["a"]


def test_memory_is_that_of_a_line(tmp_path: Path) -> None:
    """A line being read exists in a few copies: bytes, text, prompt. None of the others does."""
    size = 2 << 20
    path = tmp_path / "in.jsonl"
    path.write_bytes((b'{"prompt": "' + b"x" * size + b'"}\n') * 20)
    tracemalloc.start()
    try:
        found = read_prompts([str(path)], NOTHING)
        assert sum(1 for _ in found.lines()) == found.num_lines == 20
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1.1 * size
    assert peak < 7 * size
