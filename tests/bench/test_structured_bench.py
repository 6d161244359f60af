"""The benchmark of structured output: every request has the same length, and the figures are related to free text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gapless.bench.structured import Mixture
from gapless.cli import main
from tiny import write_tiny

FLAGS = ["--device", "cpu", "--dtype", "float32", "--max-tokens", "12", "--prompt-tokens", "4", "--rounds", "1"]


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = write_tiny(tmp_path), tmp_path / "out.json"
    asked = ["--model", str(model), "--rows", "2", "4", "--shares", "50", "100", "--json", str(out), *FLAGS]
    assert main(["bench", "structured", *asked]) == 0
    shown = capsys.readouterr().out
    assert "of free" in shown
    assert "free, beside a new one" in shown
    found = json.loads(out.read_text())
    rates = [(rate["rows"], rate["share"], rate["is_new"]) for rate in found["throughput"]]
    kinds = [(0, False), (50, False), (100, False), (50, True), (100, True)]
    assert rates == [(rows, *kind) for rows in (2, 4) for kind in kinds]
    assert all(rate["num_ended_early"] == 0 and rate["tokens_per_s"] > 0 for rate in found["throughput"])
    assert {wait["kind"] for wait in found["first_token"]} >= {"free", "known schema", "new schema"}
    assert found["throughput"][0]["of_free"] == 1.0


def test_a_shape_needs_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "structured", "--shape", "0.6B"]) == 2
    assert "--shape and --tokenizer need each other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--rows", "8", "0"], "--rows must be at least 1, got 0"),
        (["--shares", "0"], "--shares must be between 1 and 100, got 0"),
        (["--shares", "10", "101"], "--shares must be between 1 and 100, got 10 101"),
        (["--rounds", "0"], "--rounds must be at least 1"),
    ],
)
def test_wrong_numbers_are_refused(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "structured", *flags]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("rows", "share", "count"), [(16, 10, 2), (32, 50, 16), (4, 100, 4), (4, 0, 0)])
def test_at_least_the_share_is_structured(rows: int, share: int, count: int) -> None:
    assert Mixture(rows, share).num_structured == count
