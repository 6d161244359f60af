"""Kernels compiled ahead: a rehearsal finds them, nothing runs, and the steps after it compile nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
PROGRAM = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from without_gpu import *; "


def told_by(program: str, cache: Path) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def told(cache: Path) -> dict[str, Any]:
    return told_by(PROGRAM + "main()", cache)


def test_a_rehearsal_finds_every_variant_once(told: dict[str, Any]) -> None:
    found = told["rehearsed"]
    assert Counter(found["names"]) == {"copy": 1, "add": 2}
    assert found["seconds"] > 0


def test_nothing_runs_within_it_and_indices_are_valid(told: dict[str, Any]) -> None:
    found = told["rehearsed"]
    assert found["launched_within"] == ["copy"]  # by the other thread
    assert found["elsewhere"]
    assert found["found"] == [0, 0, 0, 0]


def test_afterwards_steps_run_and_compile_nothing(told: dict[str, Any]) -> None:
    found = told["rehearsed"]
    assert found["launched_after"] == ["copy", "add", "add", "add", "add"]
    assert found["compiled_later"] == 0
    assert found["compiled"] == 4  # with the other thread's
    assert found["found_in_cache"] == 0
    assert found["loaded"] == 4


def test_other_processes_compiled_them(told: dict[str, Any]) -> None:
    assert told["rehearsed"]["compiled_elsewhere"] == [True] * 3
    assert told["started"]


def test_with_a_full_cache_nobody_is_started(told: dict[str, Any], cache: Path) -> None:
    again = told_by(PROGRAM + "main(only_rehearsed=True)", cache)
    assert again["rehearsed"]["found_in_cache"] == 4
    assert again["rehearsed"]["compiled"] == 0
    assert not again["started"]


def test_for_a_few_nobody_is_started(tmp_path: Path) -> None:
    found = told_by(PROGRAM + "main(only_rehearsed=True, few=3)", tmp_path)
    assert found["rehearsed"]["compiled"] == 4
    assert not any(found["rehearsed"]["compiled_elsewhere"])
    assert not found["started"]


def test_a_rehearsal_loads_nothing_more_of_torch(told: dict[str, Any]) -> None:
    assert not told["traced"]


def test_progress_reaches_the_number_found(told: dict[str, Any]) -> None:
    progress = told["rehearsed"]["progress"]
    assert [done for done, _ in progress] == [1, 2, 3]
    assert progress[-1][1] == 3


def test_a_kernel_that_cannot_be_compiled_is_named_each_time(told: dict[str, Any]) -> None:
    assert len(told["refused"]) == 2
    for said in told["refused"]:
        assert said.startswith("kernel wrong cannot be compiled: ")
        assert "no such value" in said


def test_blocks_of_two_threads_leave_nothing_behind(told: dict[str, Any]) -> None:
    """Two engines that are built at the same time: launches run again when both are there."""
    assert told["two_at_once"] == ["add", "add"]


def test_an_error_in_the_block_is_the_callers_and_leaves_nothing_behind(told: dict[str, Any]) -> None:
    assert told["interrupted"] == ["KeyError('mine')", ["add"]]
