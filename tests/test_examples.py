"""Every example runs as a user runs it, with few tokens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "server"))

from servers import running

from stub_api import stub_api
from tiny import write_tiny

EXAMPLES = Path(__file__).parent.parent / "examples"
MAX_TOKENS = 6


def run_example(name: str, *arguments: str, max_tokens: int = MAX_TOKENS) -> list[str]:
    """The lines that the example prints; fails the test when it does not end well."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), str(max_tokens), *arguments],
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


def test_clients_of_a_server(tmp_path: Path) -> None:
    """The tiny model never calls a tool, but the server must accept what the example sends."""
    model = write_tiny(tmp_path, max_position_embeddings=1024)
    with running(tmp_path / "log.jsonl", model, "--num-blocks", "64") as server:
        assert run_example("client.py", server.url)[-1].endswith(f"tokens from {model.name}")
        assert run_example("tools.py", server.url)


def test_penalties() -> None:
    lines = run_example("penalties.py")
    counts = {line.split(": ")[0]: int(line.split(": ")[1].split()[0]) for line in lines}
    assert set(counts) == {"none", "repetition", "presence", "frequency", "bias"}
    assert counts["repetition"] > counts["none"]
    assert "sky" not in lines[-1]


def test_structured() -> None:
    described, city, moon, sun, sky = run_example("structured.py", max_tokens=10)
    assert described.endswith("(stop)")
    assert city
    assert re.search(r"'[12]\d{3}-\d\d-\d\d' \(stop\)$", moon)
    assert re.search(r"'(yes|no)' \(stop\)$", sun)
    assert sky.endswith("(length)")


def test_tools() -> None:
    calls = [call("c1", '{"city": "Oslo"}'), call("c2", '{"town": "Rome"}')]
    with stub_api() as stub:
        stub.tell({"tool_calls": calls}, {"content": "In Rome."})
        lines = run_example("tools.py", stub.url)
    assert lines[0] == 'get_weather {"city": "Oslo"} -> 4 degrees, rain'
    assert lines[1].startswith('get_weather {"town": "Rome"} -> error: ')
    assert lines[2] == "In Rome."
    assert [message["role"] for message in stub.asked[1]["messages"]] == ["user", "assistant", "tool", "tool"]
    assert stub.asked[1]["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "4 degrees, rain"}


def call(id: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_is_tested_and_short(path: Path) -> None:
    assert f'"{path.name}"' in Path(__file__).read_text(encoding="utf-8")
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 50


@pytest.mark.slow
def test_ray_data(tmp_path: Path) -> None:
    lines = run_example("ray_data.py", str(write_tiny(tmp_path)))
    assert len(lines) == len((EXAMPLES / "prompts.jsonl").read_text().splitlines())
