"""Every example runs as a user runs it, with few tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "server"))

from servers import running

EXAMPLES = Path(__file__).parent.parent / "examples"
MAX_TOKENS = 6


def run_example(name: str, *arguments: str) -> list[str]:
    """The lines that the example prints; fails the test when it does not end well."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), str(MAX_TOKENS), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_quickstart() -> None:
    lines = run_example("quickstart.py")
    assert "Paris" in lines[0]
    assert len(lines) >= 4


def test_streaming() -> None:
    lines = run_example("streaming.py")
    assert {line for line in lines if line.endswith("done: length")} == {f"[{i}] done: length" for i in range(3)}
    assert lines[-1].startswith(f"{3 * MAX_TOKENS} tokens in ")


def test_sync_vs_async() -> None:
    one, two, closing = run_example("sync_vs_async.py")
    assert one.startswith("overlap: ")
    assert "depth 1" in one
    assert "depth 2" in two
    assert "equal at both depths" in closing


def test_client(tmp_path: Path, tiny_dir: Path) -> None:
    with running(tmp_path / "log.jsonl", tiny_dir, "--num-blocks", "64") as server:
        lines = run_example("client.py", server.url)
    assert lines[-1].endswith(f"tokens from {tiny_dir.name}")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_is_tested_and_short(path: Path) -> None:
    assert f'"{path.name}"' in Path(__file__).read_text(encoding="utf-8")
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 50
