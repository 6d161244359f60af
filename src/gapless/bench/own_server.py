"""A Gapless server for the duration of a benchmark."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gapless.config import EngineOptions
from gapless.errors import ConfigError

START_S = 600.0


@contextlib.contextmanager
def own_server(engine: EngineOptions, max_queue: int) -> Iterator[str]:
    """A Gapless server on a free port; its URL."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        flags = ["--port", "0", "--log-file", str(log), "--max-queue", str(max_queue), *engine_flags(engine)]
        with subprocess.Popen([sys.executable, "-m", "gapless.cli", "serve", *flags]) as process:
            try:
                yield _wait_ready(process, log)
            finally:
                process.terminate()


def engine_flags(engine: EngineOptions) -> list[str]:
    """The flags for these options."""
    flags = []
    for field in dataclasses.fields(engine):
        value, flag = getattr(engine, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ConfigError(f"the server ended with status {process.returncode}")
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        if any(line["message"] == "the engine is ready" for line in found):
            return f"http://127.0.0.1:{next(line['port'] for line in found if 'port' in line)}"
        time.sleep(0.05)
    raise ConfigError(f"the server was not ready within {START_S:g} s")
