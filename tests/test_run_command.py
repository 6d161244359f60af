"""`gapless run` and its files, on the tiny model: what is refused before it loads, and what survives."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from gapless import line_work, part_file
from gapless.cli import main
from gapless.commands import run as run_command
from gapless.errors import InvalidRequest
from gapless.file_lock import open_locked

LINES = [
    {"id": "\ud800", "prompt": "Hello"},
    {"id": "é", "prompt": "café", "temperature": 0.9},
    {"id": "bad", "prompt": ""},
    {"id": 3, "prompt": "abc"},
]


class Bench:
    """A prompt file, an output, and the command that goes from one to the other."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.prompts, self.out, self.part = folder / "in.jsonl", folder / "out.jsonl", folder / "out.jsonl.part"
        self.prompts.write_text("".join(json.dumps(line) + "\n" for line in LINES))
        self._options = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--num-blocks", "64"]

    def run(self, *more: str, prompts: str | None = None, out: Path | str | None = None) -> int:
        files = [prompts or str(self.prompts), "-o", str(out or self.out)]
        return main(["run", *files, *self._options, "--max-tokens", "4", *more])

    def results(self) -> list[Any]:
        return [json.loads(line) for line in self.out.read_text("utf-8").splitlines()]


@pytest.fixture
def bench(tmp_path: Path, tiny_dir: Path) -> Bench:
    return Bench(tmp_path, tiny_dir)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(**_: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(run_command, "LLM", load)


def test_ids_that_utf_8_cannot_hold_come_back(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run() == 1
    assert [record["id"] for record in bench.results()] == ["\ud800", "é", "bad", 3]
    assert "error in 'bad'" in capsys.readouterr().err


@pytest.mark.usefixtures("no_model")
def test_a_second_run_is_refused_before_the_model_loads(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with open_locked(bench.part):
        assert bench.run() == 2
    error = capsys.readouterr().err
    assert "out.jsonl.part: in use by " in error
    if Path("/proc/locks").exists():
        assert f"process {os.getpid()};" in error


@pytest.mark.usefixtures("no_model")
def test_wrong_places_are_refused_before_the_model_loads(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    before = bench.prompts.read_bytes()
    bench.part.mkdir()
    assert bench.run() == 2
    assert "out.jsonl.part: is a folder; move it away" in capsys.readouterr().err
    link = bench.out.with_name("link")
    link.symlink_to(bench.prompts)
    assert bench.run(out=link) == 2
    assert "would overwrite the prompts" in capsys.readouterr().err
    assert bench.prompts.read_bytes() == before


def test_a_full_disk_ends_the_run_and_the_same_command_resumes(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run() == 1
    undisturbed = bench.out.read_bytes()
    bench.out.unlink()
    bench.part.unlink()
    real, lines = part_file.write_all, list[bytes]()

    def write(file: io.FileIO, data: bytes) -> None:
        lines.append(data)
        if len(lines) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, data)

    capsys.readouterr()
    with patch.object(part_file, "write_all", write):
        assert bench.run() == 1
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert "stopped after 2 of 4 prompts; their results are kept in" in error
    assert not bench.out.exists()
    assert bench.run() == 1
    assert "resuming from" in capsys.readouterr().err
    assert bench.out.read_bytes() == undisturbed


def test_a_run_without_a_result_names_no_file(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(run_command.Work, "do", side_effect=KeyboardInterrupt):
        assert bench.run() == 130
    assert "stopped after 0 of 4 prompts; nothing is written yet" in capsys.readouterr().err
    assert not bench.part.exists()


def test_damaged_lines_run_again_when_asked_to(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run() == 1
    undisturbed = bench.out.read_bytes()
    with patch.object(run_command.ResultFile, "finish", side_effect=KeyboardInterrupt):
        assert bench.run() == 130
    assert "stopped after 4 of 4 prompts" in capsys.readouterr().err
    data = bench.part.read_bytes()
    at = data.index(b'"text": "') + 9
    bench.part.write_bytes(data[:at] + b"ghost" + data[at:])
    assert bench.run() == 2
    error = capsys.readouterr().err
    assert "out.jsonl.part:" in error
    assert "--skip-damaged" in error
    assert bench.run("--skip-damaged") == 1
    assert bench.out.read_bytes() == undisturbed


def test_a_fifo_is_streamed_to_and_stays_one(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(bench.out)
    read = list[bytes]()
    reader = threading.Thread(target=lambda: read.append(bench.out.read_bytes()))
    reader.start()
    assert bench.run() == 1
    reader.join(10)
    assert {json.loads(line)["index"] for line in read[0].splitlines()} == {0, 1, 2, 3}
    assert stat.S_ISFIFO(bench.out.stat().st_mode)
    assert not bench.part.exists()
    captured = capsys.readouterr()
    assert captured.err.count("cannot be resumed") == 1
    assert captured.out == ""


def test_prompts_from_standard_input_resume_by_their_content(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = b"\xef\xbb\xbf" + bench.prompts.read_bytes().replace(b"\n", b"\r\n")

    def run(data: bytes) -> int:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "ascii"))
        return bench.run(prompts="-")

    with patch.object(run_command.ResultFile, "finish", side_effect=KeyboardInterrupt):
        assert run(data) == 130
    assert run(data.replace(b"Hello", b"Hullo")) == 2
    assert "different run (the prompts have changed)" in capsys.readouterr().err
    assert run(data) == 1
    assert "4 prompts are done" in capsys.readouterr().err
    assert [record["index"] for record in bench.results()] == [0, 1, 2, 3]


def test_errors_are_beside_the_results_and_run_alone(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt fails in the first run only; the second runs it and nothing else."""
    real, asked = line_work.prepare, list[Any]()

    def refuse(llm: Any, dialect: Any, line: Any, sampling: Any) -> Any:
        asked.append(line.id)
        if line.id == 3 and asked.count(3) == 1:
            raise InvalidRequest("not now")
        return real(llm, dialect, line, sampling)

    errors = bench.out.with_name("out.errors.jsonl")
    with patch.object(line_work, "prepare", refuse):
        assert bench.run("--retry-errors") == 2
        assert "no errors to retry" in capsys.readouterr().err
        assert bench.run() == 1
        assert [json.loads(line)["id"] for line in errors.read_text().splitlines()] == ["bad", 3]
        asked.remove("bad")
        assert bench.run() == 1
        assert len(asked) == 3, "nothing runs that has a result, errors included"
        assert "2 prompts failed" in capsys.readouterr().err
        assert bench.run("--retry-errors", "--temperature", "0.5") == 2
        assert "different run (temperature was not set, now 0.5)" in capsys.readouterr().err
        assert bench.run("--retry-errors") == 1
    assert asked[3:] == ["bad", 3]
    assert [json.loads(line)["id"] for line in errors.read_text().splitlines()] == ["bad"]
    retried = bench.out.read_bytes()
    assert bench.run("--restart") == 1
    assert bench.out.read_bytes() == retried


def test_several_files_are_one_run(bench: Bench) -> None:
    bench.prompts.write_text('{"prompt": "a"}\n')
    bench.prompts.with_name("in2.jsonl").write_text('{"prompt": "b"}\n{"prompt": "c"}\n')
    assert bench.run(prompts=str(bench.prompts.with_name("in*.jsonl"))) == 0
    assert [(record["index"], record["id"]) for record in bench.results()] == [(0, 0), (1, 1), (2, 2)]
    assert not bench.part.exists()


def test_the_errors_file_is_never_also_the_input(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    errors = bench.out.with_name("out.errors.jsonl")
    errors.write_bytes(bench.prompts.read_bytes())
    assert bench.run(prompts=str(errors)) == 2
    assert "would overwrite the prompts" in capsys.readouterr().err


def test_a_retry_that_heals_every_error_succeeds(bench: Bench) -> None:
    bench.prompts.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in "abc"))
    real = line_work.prepare

    def refuse(llm: Any, dialect: Any, line: Any, sampling: Any) -> Any:
        if line.index == 1:
            raise InvalidRequest("not now")
        return real(llm, dialect, line, sampling)

    with patch.object(line_work, "prepare", refuse):
        assert bench.run() == 1
    assert bench.run("--retry-errors") == 0
    assert [record["index"] for record in bench.results()] == [0, 1, 2]
    assert all("error" not in record for record in bench.results())
    assert sorted(path.name for path in bench.out.parent.iterdir()) == ["in.jsonl", "out.jsonl"]
