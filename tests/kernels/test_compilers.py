"""Processes that compile: whatever happens to them or to a recipe, the caller gets an answer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gapless.kernels.compilers import Compilers, Recipe

pytest.importorskip("triton")
TARGET = ("cuda", 90, 32)


@pytest.fixture(scope="module")
def compilers() -> Iterator[Compilers]:
    with Compilers(2, few=0) as found:
        yield found


def recipe(module: str = "no.such.module", **constants: object) -> Recipe:
    return Recipe(module, "kernel", {}, dict(constants), {}, TARGET, {})


def test_a_recipe_that_fails_is_not_compiled(compilers: Compilers) -> None:
    assert compilers.compile(recipe()) is False
    assert compilers.compile(recipe("json")) is False


def test_a_recipe_that_cannot_be_sent_is_not_compiled(compilers: Compilers) -> None:
    assert compilers.compile(recipe(lock=threading.Lock())) is False
    assert compilers.compile(recipe(function=lambda: None)) is False


def test_processes_that_died_compile_nothing_and_keep_nobody_waiting() -> None:
    with Compilers(2, few=0) as found:
        assert found.compile(recipe()) is False
        assert found._process is not None
        os.killpg(found._process.pid, signal.SIGKILL)
        began = time.monotonic()
        assert [found.compile(recipe()) for _ in range(4)] == [False] * 4
        assert time.monotonic() - began < 5


def test_an_empty_cache_is_a_reason_to_start_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compilers, "_start", lambda self: started.append(self))
    (tmp_path / "full" / "kernel").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for name, expected in (("full", 0), ("empty", 1), ("missing", 1)):
        started = list[Compilers]()
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / name))
        Compilers(1).start_if_cold()
        assert len(started) == expected


def test_where_no_process_can_be_had_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr("gapless.kernels.compilers.subprocess.Popen", refuse)
    with Compilers(1, few=0) as found:
        assert found.compile(recipe()) is False


def test_they_end_when_they_are_closed() -> None:
    found = Compilers(2, few=0)
    found.close()  # never started
    found.start()
    process = found._process
    assert process is not None
    found.close()
    assert process.poll() is not None
