"""Turns are taken in order, trouble stays an engine's own, and no process is left behind.

A scripted worker stands in for the engines: the contest is told that it is their interpreter.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gapless.bench import contest
from gapless.bench.contest import Child, TaskStart, is_installed, run_contest
from gapless.bench.job import BenchJob, Contender, ContestTask, EngineFailure, EngineLoaded, Round

HEAD = """
import json, os, subprocess, sys, time
def say(kind, **values): print(json.dumps({"kind": kind, **values}), flush=True)
def ready(): say("EngineLoaded", version="1", weights="fp32")
def done(seconds=1.0): say("Round", seconds=seconds, peak_bytes=1, tokens=[[1]], overlap=None)
def note(text): open(os.path.join(os.path.dirname(__file__), "notes"), "a").write(text + "\\n")
task = json.loads(sys.stdin.readline())
"""
JOB = BenchJob("m", 1, 1, [[1]])
Fake = Callable[[str, str], TaskStart]


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """Makes a start whose worker runs this body after reading its task."""

    def make(name: str, body: str) -> TaskStart:
        script = tmp_path / f"{name}.py"
        script.write_text(HEAD + body)
        python = tmp_path / name
        python.write_text(f"#!/bin/sh\nexec {sys.executable} -S {script}\n")
        python.chmod(0o755)
        contender = Contender(name, name, name, name, "fp32")
        return TaskStart(ContestTask(JOB, contender, "", "fp32", 1), str(python))

    return make


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "SETTLE_S", 0.0)


def child_of(start: TaskStart, tmp_path: Path) -> Child:
    return Child(start.python, 1, tmp_path / "log")


def wait_until_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":  # killed, and only not yet collected by its new parent
            return True
        time.sleep(0.05)
    return False


def test_engines_take_turns_and_warm_up_rounds_do_not_count(fake: Fake, tmp_path: Path) -> None:
    body = "note('load ' + task['contender']['name']); ready()\nfor line in sys.stdin:\n  note(NAME); done(SECONDS)\n"
    starts = [fake(n, f"NAME = {n!r}; SECONDS = {s}\n" + body) for n, s in (("a", 1.0), ("b", 2.0))]
    turns: list[int] = []
    results = run_contest(starts, 2, 1, tmp_path, turns.append)
    assert (tmp_path / "notes").read_text().split("\n")[:-1] == ["load a", "load b"] + ["a", "b"] * 3
    assert [[r.seconds for r in result.rounds] for result in results] == [[1.0, 1.0], [2.0, 2.0]]
    assert sum(turns) == 2 * (1 + 1 + 2)
    assert all(result.error is None and result.load_s > 0 for result in results)


def test_one_engines_failure_does_not_stop_the_others(fake: Fake, tmp_path: Path) -> None:
    good = "ready()\nfor line in sys.stdin: done()\n"
    starts = [
        fake("refuses", "say('EngineFailure', error='ImportError: no such thing')"),
        fake("dies", "ready(); sys.stdin.readline(); print('last words', file=sys.stderr); os._exit(3)"),
        fake("killed", "os.kill(os.getpid(), 9)"),
        fake("good", good),
    ]
    results = run_contest(starts, 2, 0, tmp_path, lambda count: None)
    assert [result.error for result in results] == [
        "ImportError: no such thing",
        "ended with exit code 3: last words",
        "killed by SIGKILL",
        None,
    ]
    assert len(results[3].rounds) == 2


def test_what_an_engine_prints_goes_to_its_log(fake: Fake, tmp_path: Path) -> None:
    start = fake("chatty", "print('a warning', file=sys.stderr); ready()\nfor line in sys.stdin: done()\n")
    run_contest([start], 1, 0, tmp_path, lambda count: None)
    assert (tmp_path / "1-0-chatty.log").read_text() == "a warning\n"


def test_silence_is_a_failure(fake: Fake, tmp_path: Path) -> None:
    with child_of(fake("silent", "time.sleep(60)"), tmp_path) as child:
        assert child.answer("{}\n", timeout_s=0.05) == EngineFailure("no answer within 0 s")


def test_closing_kills_what_the_engine_started(fake: Fake, tmp_path: Path) -> None:
    body = "p = subprocess.Popen(['sleep', '60']); say('EngineFailure', error=f'{os.getpid()} {p.pid}'); time.sleep(60)"
    child = child_of(fake("parent", body), tmp_path)
    answer = child.answer("{}\n")
    assert isinstance(answer, EngineFailure)
    child.close()
    child.close()
    assert all(wait_until_gone(int(pid)) for pid in answer.error.split())


def test_an_interrupt_leaves_no_process(fake: Fake, tmp_path: Path) -> None:
    start = fake("running", "note(str(os.getpid())); ready()\nfor line in sys.stdin: done()\n")

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_contest([start], 1, 0, tmp_path, interrupt)
    assert wait_until_gone(int((tmp_path / "notes").read_text()))


def test_children_get_the_number_of_threads(fake: Fake, tmp_path: Path) -> None:
    start = fake("env", "say('EngineFailure', error=os.environ['OMP_NUM_THREADS'])")
    with Child(start.python, 7, tmp_path / "log") as child:
        assert child.answer("{}\n") == EngineFailure("7")


def test_modules_are_found_by_the_interpreter_that_is_asked() -> None:
    assert is_installed("json", sys.executable)
    assert not is_installed("no_such_module_anywhere", sys.executable)


def test_answers_are_typed(fake: Fake, tmp_path: Path) -> None:
    with child_of(fake("typed", "ready(); sys.stdin.readline(); done()"), tmp_path) as child:
        assert child.answer("{}\n") == EngineLoaded("1", "fp32")
        assert child.answer("run\n") == Round(1.0, 1, [[1]], None)
        assert isinstance(child.answer("run\n"), EngineFailure)
    assert os.getpgrp()  # still here: only the child's own group was killed
