"""Prompt files in, result files out, and nothing lost between."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from gapless.batch_file import BadLine, Line, ResultFile, error_record, fingerprint, read_lines, read_prompts
from gapless.errors import ConfigError, InvalidRequest


def test_good_lines() -> None:
    text = '{"prompt": "a", "id": "x", "top_k": 3}\n\n{"messages": [], "id": 7}\n{"prompt": [1, 2]}\n'
    first, second, third = read_lines(text)
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
    (found,) = read_lines(line)
    assert isinstance(found, BadLine)
    assert words in found.error


def test_only_line_feeds_end_a_line() -> None:
    """U+2028 and U+0085 end a line for str.splitlines, but not in JSON Lines."""
    (found,) = read_lines('{"prompt": "a\u2028b\u0085c"}')
    assert isinstance(found, Line)
    assert found.prompt == "a\u2028b\u0085c"


def test_prompts_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such file"):
        read_prompts(str(tmp_path / "none.jsonl"), io.StringIO())
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(InvalidRequest, match="no prompts"):
        read_prompts(str(tmp_path / "empty"), io.StringIO())
    with pytest.raises(InvalidRequest, match="no prompts"):
        read_prompts("-", io.StringIO(""))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match="UTF-8"):
        read_prompts(str(tmp_path / "binary"), io.StringIO())


def test_results_come_out_in_input_order(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "out.jsonl", "me", restart=False)
    for index in (2, 0, 1):
        file.add({"index": index, "id": index, "text": "é\u0085"})
    assert not (tmp_path / "out.jsonl").exists()
    file.finish()
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert [json.loads(line)["index"] for line in lines] == [0, 1, 2]
    assert not file.part.exists()


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = ResultFile(path, "me", restart=False)
    first.add({"index": 1, "id": 1, "text": "done\u0085"})
    first.add(error_record(2, 2, "bad"))
    first.close()
    with first.part.open("a") as torn:
        torn.write('{"index": 3, "te')
    second = ResultFile(path, "me", restart=False)
    assert set(second.records) == {1}  # errors are tried again, a torn line too
    second.add({"index": 0, "id": 0, "text": "new"})
    second.close()
    third = ResultFile(path, "me", restart=False)
    assert set(third.records) == {0, 1}


def test_a_part_file_of_another_run_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = ResultFile(path, "me", restart=False)
    first.add({"index": 0, "id": 0, "text": "precious"})
    first.close()
    with pytest.raises(ConfigError, match="--restart"):
        ResultFile(path, "somebody else", restart=False)
    assert "precious" in first.part.read_text()
    assert ResultFile(path, "somebody else", restart=True).records == {}


def test_no_part_file_before_the_first_result(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "out.jsonl", "me", restart=False)
    file.close()
    assert not file.part.exists()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        ResultFile(tmp_path / "none" / "out.jsonl", "me", restart=False)
    with pytest.raises(ConfigError, match="is a directory"):
        ResultFile(tmp_path, "me", restart=False)


def test_fingerprints_differ_by_text_and_settings() -> None:
    prints = {fingerprint("a", {"model": "m"}), fingerprint("b", {"model": "m"}), fingerprint("a", {"model": "n"})}
    assert len(prints) == 3
