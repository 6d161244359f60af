"""The benchmark of accuracy: its figures from made-up readings, a run of a tiny model, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from gapless.bench.accuracy import AccuracyScore, TextReading, chosen, common_length, read_passages, reference_options
from gapless.cli import main
from gapless.config import EngineOptions
from quantized import write_quantized

on_cpu = ["--device", "cpu", "--max-tokens", "4", "--num-threads", "1"]


def test_a_score_relates_a_reading_to_the_reference() -> None:
    reference = TextReading((-1.0, -3.0), (5, 6), ((1, 2, 3, 4), (7, 8, 9, 9)))
    assert math.isclose(reference.perplexity, math.exp(2))
    found = AccuracyScore.of("x", TextReading((-1.5, -2.0), (5, 7), ((1, 2, 0, 4), (7, 8, 9, 9))), reference)
    assert math.isclose(found.of_reference, math.exp(-0.25))
    assert (found.logprob_error, found.agreement, found.greedy_agreement) == (0.75, 0.5, 6 / 8)
    assert common_length((1, 2), (1, 2, 3)) == 2


def test_a_run(tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("one two three four five six\n\nseven eight nine ten\n")
    asked = ["--model", str(tiny_dir), "--text", str(text), "--json", str(out), *on_cpu]
    assert main(["bench", "accuracy", *asked]) == 0
    assert "of 2 passages, 4 greedy tokens for each" in capsys.readouterr().out
    scores = {score["name"]: score for score in json.loads(out.read_text())["scores"]}
    assert list(scores) == ["reference", "bfloat16", "fp8", "kv-fp8", "fp8 kv-fp8"]
    assert scores["reference"]["of_reference"] == scores["reference"]["agreement"] == 1
    errors = [scores[name]["logprob_error"] for name in ("bfloat16", "fp8", "kv-fp8", "fp8 kv-fp8")]
    assert all(0 < error < 1 for error in errors), errors
    assert errors[0] < min(errors[1:])
    assert "KV cache float8_e4m3fn" in scores["kv-fp8"]["about"]


def test_kinds_of_a_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_quantized(tmp_path / "m.gguf", "Q8_0")
    options = reference_options(EngineOptions(model=str(model), device="cpu"))
    names = ["bfloat16", "fp8", "kv-fp8", "fp8 kv-fp8", "stored", "Q8_0", "Q4_0", "Q4_1"]
    assert [variant.name for variant in chosen(None, options)] == names
    (tmp_path / "t").write_text("lolololololololololo" * 2)
    asked = ["--model", str(model), "--variants", "stored", "Q4_0", "--text", str(tmp_path / "t"), *on_cpu]
    assert main(["bench", "accuracy", *asked]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[2:]] == ["reference", "stored", "Q4_0"]
    assert "weights Q8_0" in shown
    assert "weights Q4_0" in shown


def test_the_text() -> None:
    passages = read_passages(None)
    assert len(passages) == 14
    assert passages[2].startswith("def merge_intervals(intervals):")


def test_what_is_refused(tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n\n")
    cases = {
        "--variants: there is no 'int3'; known: bfloat16, fp8,": ["--variants", "int3"],
        "--variants Q8_0: ": ["--variants", "Q8_0"],
        "--max-tokens must be at least 1": ["--max-tokens", "0"],
        f"--text {empty}: has no text": ["--text", str(empty)],
        "--text /nowhere: cannot be read": ["--text", "/nowhere"],
        "--max-tokens 500 leaves no room for text in a request": ["--max-tokens", "500"],
    }
    for told, flags in cases.items():
        assert main(["bench", "accuracy", "--model", str(tiny_dir), *on_cpu, *flags]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU")
def test_the_reference_is_whole(tiny_dir: Path) -> None:
    given = EngineOptions(model=str(tiny_dir), device="cpu", quantization="fp8", kv_dtype="fp8")
    found = reference_options(given)
    assert (found.dtype, found.quantization, found.kv_dtype) == ("float32", "none", "auto")
