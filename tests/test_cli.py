"""The command line as a stranger uses it, wrong input included."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gapless import __version__
from gapless.cli import build_parser, main

LINES = [
    {"id": "greedy", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 4},
    {"id": "drawn", "prompt": "Once upon a time", "max_tokens": 4},
    {"id": "chat", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 4},
]


def write_lines(path: Path, lines: list[Any]) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_version_and_help_do_not_load_torch() -> None:
    code = "import sys; from gapless.cli import build_parser; build_parser(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"gapless {__version__}"


def test_run_writes_results_in_order_and_repeats_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = write_lines(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    found = []
    for depth in ("1", "2"):
        arguments = ["run", prompts, "-o", str(out), "--depth", depth, "--dtype", "float32", "--token-ids"]
        assert main(arguments) == 0
        found.append(read_results(out))
    assert [record["id"] for record in found[0]] == ["greedy", "drawn", "chat"]
    assert found[0] == found[1]
    assert found[0][0]["text"].startswith(" Paris")
    assert found[0][0]["num_tokens"] == len(found[0][0]["token_ids"]) == 4
    captured = capsys.readouterr()
    assert "3 of 3 prompts completed" in captured.out
    assert "overlap:" in captured.out
    assert "device busy" in captured.out


def test_bad_lines_do_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = [
        "{broken",
        {"id": "unknown", "prompt": "a", "temprature": 1},
        {"id": "hot", "prompt": "a", "temperature": -1},
        {"id": "empty", "prompt": ""},
        {"id": "ids", "prompt": [999999]},
        {"id": "chat", "messages": "hello"},
    ]
    prompts, out = write_lines(tmp_path / "in.jsonl", [*bad, LINES[0]]), tmp_path / "out.jsonl"
    assert main(["run", prompts, "-o", str(out)]) == 1
    records = read_results(out)
    assert len(records) == 7
    assert all("error" in record for record in records[:6])
    assert "did you mean 'temperature'" in records[1]["error"]
    assert "-1" in records[2]["error"]
    assert "999999" in records[4]["error"]
    assert "error" not in records[6]
    captured = capsys.readouterr()
    assert "error in 'hot'" in captured.err
    assert "1 of 7 prompts completed" in captured.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "no/such/file.jsonl"], "no such file"),
        (["generate", "x", "--model", "no/such/dir/x"], "no such"),
        (["generate", "x", "--depth", "0"], "depth must be a whole number between 1 and 8, got 0"),
        (["generate", "x", "--depth", "two"], "depth"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens must be between 1"),
        (["generate", "x", "--temperature", "nan"], "temperature must be a number"),
        (["generate", "x", "--kv-memory", "1KiB"], "one block of 16 tokens takes"),
        (["generate", "x", "--kv-memory", "lots"], "kv_memory must be a size"),
        (["generate", "x", "--max-model-len", "99999999"], "beyond the model's 8192"),
        (["info", "--dtype", "int8"], "dtype must be one of"),
    ],
)
def test_wrong_usage_is_one_clear_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("gapless: ")
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "gapless: the following arguments are required: COMMAND"),
        (["generate", "x", "--temprature", "1"], "unknown option --temprature; did you mean --temperature?"),
        (["generate", "x", "--max-token=1"], None),  # argparse accepts a unique beginning
        (["generate", "two", "words"], "unexpected argument 'words'; text with spaces needs quotes"),
        (["bench", "host", "--stepps", "1"], "gapless bench host: unknown option --stepps; did you mean --steps?"),
        (["info", "--xyzzy"], "gapless info: unknown option --xyzzy\n"),
        (["serve", "--port", "x"], "gapless serve: argument --port: invalid int value: 'x'"),
    ],
)
def test_a_wrong_argument_is_two_lines(
    arguments: list[str], words: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if words is None:
        assert build_parser().parse_args(arguments).max_tokens == 1
        return
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 2
    assert "--help` for the options" in error


def test_generate_streams(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "The capital of France is", "--temperature", "0", "--max-tokens", "4"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(" Paris")
    assert "overlap:" in captured.err
    assert main(["generate", "Say hello.", "--chat", "--temperature", "0", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.strip()


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--kv-memory", "64MiB"]) == 0
    out = capsys.readouterr().out
    for words in ("cpu", "30 layers", "KV cache", "blocks of 16 tokens", "8192 tokens a request"):
        assert words in out


def test_bench_host_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "host.json"
    assert main(["bench", "host", "--batch", "1", "4", "--steps", "20", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["batch"] for row in rows] == [1, 4]
    assert all(row["host_ms_per_step"] > 0 for row in rows)
    assert "ms/step" in capsys.readouterr().out


def test_bench_host_checks_its_file_before_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, words in ((tmp_path / "none" / "x.json", "no such folder"), (tmp_path, "it is a folder")):
        assert main(["bench", "host", "--batch", "1", "--steps", "20", "--json", str(path)]) == 2
        captured = capsys.readouterr()
        assert f"{path}: cannot be written: {words}" in captured.err
        assert "ms/step" not in captured.out


def test_an_interrupted_run_keeps_what_is_done_and_goes_on(tmp_path: Path) -> None:
    """SIGINT in the middle: exit code 130, a part file, and the same command finishes the job with the same results."""
    short = [{"id": i, "prompt": f"Number {i}:", "max_tokens": 2 if i < 4 else 1500} for i in range(6)]
    prompts, out = write_lines(tmp_path / "in.jsonl", short), tmp_path / "out.jsonl"
    arguments = ["run", prompts, "-o", str(out), "--ignore-eos", "--dtype", "float32"]
    command = [sys.executable, "-m", "gapless.cli", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    part = tmp_path / "out.jsonl.part"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as child:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and (not part.exists() or len(part.read_text().splitlines()) < 5):
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "4 of 6 prompts" in err
    assert "Run the same command again" in err
    assert "Traceback" not in err
    assert not out.exists()
    kept = {record["id"]: record for record in read_results(part)[1:]}
    assert all(record.pop("crc") for record in kept.values())
    assert set(kept) == {0, 1, 2, 3}

    write_lines(tmp_path / "in.jsonl", [{**line, "max_tokens": 2} for line in short])
    other = subprocess.run(command, capture_output=True, text=True, check=False)
    assert other.returncode == 2
    assert "different run" in other.stderr
    assert main([*arguments, "--restart"]) == 0
    assert {record["id"]: record for record in read_results(out)[:4]} == kept
