"""`gapless check` as a user meets it: a verdict, an exit code, a file that plays a failure again."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from gapless.cli import main
from gapless.core.scoring import Scoring
from gapless.runner.row_store import RowStore

TINY = ["check", "--model", "tiny/llama/0", "--seeds", "4", "--steps", "6"]


def advance_without_length(original):
    def advance(self: RowStore, packed, tokens, needs) -> None:
        original(self, packed, tokens, needs)
        if len(packed.decode_rows) > 1:
            self.length[packed.decode_rows[:1].long()] -= 1

    return advance


def broken() -> object:
    return patch.object(RowStore, "advance", advance_without_length(RowStore.advance))


def test_a_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert main([*TINY, "--json", str(report)]) == 0
    out = capsys.readouterr().out
    assert "verdict     PASS" in out
    assert "each request against the same request alone, at depth 1" in out
    value = json.loads(report.read_text())
    assert value["passed"]
    assert value["num_schedules"] == 12
    assert value["num_compared"] > 50
    assert value["num_scores"] > 50
    assert value["num_stopped"] > 0
    assert value["num_conflicts"] == 0


def test_a_failure_is_saved_small_and_plays_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "failure.json"
    with broken():
        assert main([*TINY, "--save", str(path)]) == 1
        out = capsys.readouterr().out
        assert "verdict     FAIL" in out
        assert f"gapless check --replay {path}" in out
        saved = json.loads(path.read_text())["schedule"]
        assert len(saved["asks"]) == 2  # two rows must decode together, and no more
        first = (main(["check", "--replay", str(path)]), capsys.readouterr().out)
        assert first == (main(["check", "--replay", str(path)]), capsys.readouterr().out)
        assert first[0] == 1
        assert "verdict     FAIL" in first[1]
    assert main(["check", "--replay", str(path)]) == 0
    assert "nothing wrong this time" in capsys.readouterr().out


@pytest.mark.slow
def test_a_wrong_log_probability_is_saved_small_and_plays_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompt tokens that follow a chunk's first one, in chunks that do not begin the prompt."""
    path, original = tmp_path / "failure.json", Scoring.targets

    def targets(self: Scoring, row: int, start: int, end: int):
        found, first = original(self, row, start, end)
        return (found[::-1].copy() if start else found), first

    with patch.object(Scoring, "targets", targets):
        assert main([*TINY, "--save", str(path)]) == 1
        assert "shows       log-probabilities: request" in capsys.readouterr().out
        params = [ask["params"] for ask in json.loads(path.read_text())["schedule"]["asks"]]
        assert [p["prompt_logprobs"] is not None for p in params].count(True) == 1
        assert not any(p["logprobs"] is not None for p in params)
        assert main(["check", "--replay", str(path)]) == 1
        assert "now         log-probabilities: request" in capsys.readouterr().out
    assert main(["check", "--replay", str(path)]) == 0


def test_prompts_of_a_file(tmp_path: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"id": "text", "prompt": "Hello", "temperature": 0.7, "seed": 3},
        {"prompt": [1, 2, 3, 4], "stop_token_ids": [9], "max_tokens": 3},
        {"messages": [{"role": "user", "content": "Hi"}], "stop": ["e"]},
    ]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    command = ["check", "--model", str(tiny_dir), "--prompts", str(prompts), "--seeds", "2", "--device", "cpu"]
    assert main([*command, "--dtype", "float32"]) == 0
    assert "3 prompts" in capsys.readouterr().out


def test_where_rounding_may_differ_steps_are_compared(tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", "--model", str(tiny_dir), "--seeds", "3", "--device", "cpu", "--dtype", "bfloat16"]
    assert main([*command, "--no-native"]) == 0
    out = capsys.readouterr().out
    assert "each step against the same step at depth 1, bit for bit" in out
    assert "verdict     PASS" in out


def test_a_model_without_a_tokenizer_gets_random_tokens(dummy_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", "--model", str(dummy_dir), "--load-format", "dummy", "--dtype", "float32", "--seeds", "2"]
    assert main([*command, "--device", "cpu"]) == 0
    assert "12 prompts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "seeds must be between 1 and"),
        (["--replay", "no-such-file.json"], "cannot be replayed"),
        (["--json", "/no/such/folder/report.json"], "no such folder"),
        (["--save", "/no/such/folder/failure.json"], "no such folder"),
        (["--save", "/"], "is a folder"),
        (["--model", "tiny/nothing/0"], "a tiny model is tiny/FAMILY/SEED"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_bad_prompt_file_is_told(tmp_path: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "bad.jsonl"
    prompts.write_text('{"prompt": 3}')
    assert main(["check", "--model", str(tiny_dir), "--prompts", str(prompts)]) == 2
    assert "must be text or a list of token ids" in capsys.readouterr().err
