"""Shapes on the command line and in prompt files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gapless.cli import build_parser, main, sampling_values
from gapless.errors import InvalidRequest

ENGINE = ["--device", "cpu", "--dtype", "float32", "--num-blocks", "64"]
SCHEMA = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}


def shape(*flags: str) -> Any:
    args = build_parser().parse_args(["generate", "x", *flags])
    return sampling_values(args).get("structured")


def test_each_flag(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('start: "a"')
    assert shape("--json-schema", str(schema)) == {"json_schema": json.dumps(SCHEMA)}
    assert shape("--structural-tag", str(schema)) == {"structural_tag": json.dumps(SCHEMA)}
    assert shape("--json-object") == {"json_object": True}
    assert shape("--regex", "[0-9]+") == {"regex": "[0-9]+"}
    assert shape("--choice", "a", "--choice", "b") == {"choice": ["a", "b"]}
    assert shape("--grammar", str(grammar)) == {"grammar": 'start: "a"'}
    assert shape() is None


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--regex", "a", "--choice", "b"], "--regex and --choice exclude each other"),
        (["--json-schema", "/nonexistent"], "cannot be read"),
        (["--regex", ""], "not empty"),
    ],
)
def test_bad_flags_are_refused(flags: list[str], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        shape(*flags)


def test_generate(tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--model", str(tiny_dir), "--choice", "left", "--choice", "right", *ENGINE]) == 0
    assert capsys.readouterr().out.strip() in ("left", "right")
    assert main(["generate", "x", "--model", str(tiny_dir), "--regex", "(a", *ENGINE]) == 2
    assert "structured: this regex cannot be used" in capsys.readouterr().err


def test_a_prompt_file(tiny_dir: Path, tmp_path: Path) -> None:
    """Lines override the flag; one that cannot be used is an error of its own."""
    lines: list[dict[str, Any]] = [
        {"prompt": "a"},
        {"prompt": "b", "structured": {"json_schema": SCHEMA, "disable_any_whitespace": True}},
        {"prompt": "c", "structured": {"regex": "(a"}},
        {"prompt": "d", "structured": {"regex": "a", "choice": ["b"]}},
    ]
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert main(["run", str(file), "-o", str(out), "--model", str(tiny_dir), "--regex", "[xy]{4}", *ENGINE]) == 1
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert set(found[0]["text"]) <= {"x", "y"}
    assert len(found[0]["text"]) == 4
    assert all(type(item) is bool for item in json.loads(found[1]["text"]))
    assert "unclosed" in found[2]["error"]
    assert "exactly one" in found[3]["error"]
