"""Rank 0's view of the others: starting, plans, and every way in which one of them may be lost.

The others are small scripts that speak their part and load no torch.
"""

from __future__ import annotations

import gc
import os
import queue
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from gapless.core.plan import Plan
from gapless.errors import RankFailed
from gapless.ranks.local import LocalSquad
from gapless.ranks.team import Team
from rank_pids import child_pids

NUM_RANKS = 3
PLAN = Plan(
    5,
    np.arange(2, dtype=np.int32),
    (),
    np.empty((0, 3), np.int32),
    np.arange(2, dtype=np.int32),
    np.zeros(2, np.int64),
    4,
)
BEGIN = """
import json, os, signal, socket, sys, time
link, bell = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
def say(kind, **values): link.sendall(json.dumps({"kind": kind, **values}).encode() + b"\\n")
def hear(): return json.loads(link.makefile().readline() or "{}")
say("here")
rank = hear().get("rank")
"""
SERVE = """
say("ready"); hear()
while os.read(bell, 1): plan_came()
"""


class Watched:
    """A team of scripts, and the alarms that it gave."""

    def __init__(self, tmp_path: Path, script: str, timeout_s: float = 10.0) -> None:
        (tmp_path / "mate.py").write_text(BEGIN + script)
        self.alarms: queue.SimpleQueue[RankFailed] = queue.SimpleQueue()
        command = (sys.executable, "-S", str(tmp_path / "mate.py"))
        self.team = Team([squad(command, timeout_s)], timeout_s, self.alarms.put)

    def start(self) -> None:
        self.team.begin(word="x")
        self.team.go(num_places=2, place_words=200)

    def check_lost(self, *reasons: str) -> None:
        """The alarm names the first cause, plans are refused with it, and nobody is left."""
        failure = self.alarms.get(timeout=10)
        assert any(reason in str(failure) for reason in reasons), failure
        assert f"the group of {NUM_RANKS} ranks has ended" in str(failure)
        with pytest.raises(RankFailed) as refused:
            self.team.send(PLAN)
        assert refused.value is failure
        assert self.team.blame(RuntimeError("gloo")) is failure
        self.team.close()
        self.check_gone()

    def check_gone(self) -> None:
        assert not [pid for pid in child_pids(self.team) if is_alive(pid)]


def squad(command: Sequence[str], timeout_s: float = 1.0) -> LocalSquad:
    return LocalSquad(range(1, NUM_RANKS), "127.0.0.1", timeout_s, command)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def serving(answer: str) -> str:
    return f"def plan_came(): {answer}\n{SERVE}"


def test_ranks_start_get_plans_and_end_when_the_team_is_closed(tmp_path: Path) -> None:
    watched = Watched(tmp_path, serving(f"open(r'{tmp_path}/' + str(rank), 'a').write('x')"))
    watched.start()
    for _ in range(2):
        watched.team.send(PLAN)
    watched.team.close()
    watched.team.close()
    watched.check_gone()
    assert [(tmp_path / str(rank)).read_text() for rank in (1, 2)] == ["xx", "xx"]
    assert watched.alarms.empty()


LOSSES: dict[str, tuple[str, tuple[str, ...]]] = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL) if rank == 2 else None", ("rank 2 was killed by SIGKILL",)),
    "exits": ("os._exit(3) if rank == 1 else None", ("rank 1 exited with status 3",)),
    "raises": ("say('failed', reason='no memory', lost=False) if rank == 1 else None", ("rank 1 failed: no memory",)),
    "others notice first": (
        "say('failed', reason='rank 1 is gone', lost=True) if rank == 2 else (time.sleep(0.05), os._exit(4))",
        ("rank 1 exited with status 4",),
    ),
    "stands still": (
        "say('failed', reason='timed out', lost=True) if rank == 2 else time.sleep(60)",
        ("ranks [1] did not answer; rank 2 failed: timed out",),
    ),
}


@pytest.mark.parametrize("how", LOSSES)
def test_a_rank_is_lost(how: str, tmp_path: Path) -> None:
    answer, reasons = LOSSES[how]
    watched = Watched(tmp_path, serving(answer))
    watched.start()
    watched.team.send(PLAN)
    watched.check_lost(*reasons)


def test_a_rank_is_lost_while_nothing_runs(tmp_path: Path) -> None:
    watched = Watched(tmp_path, serving("None"))
    watched.start()
    os.kill(child_pids(watched.team)[0], signal.SIGTERM)
    watched.check_lost("rank 1 was killed by SIGTERM")


def test_a_rank_cannot_load(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "say('failed', reason='corrupt', lost=False) if rank == 2 else hear()")
    watched.team.begin()
    with pytest.raises(RankFailed, match="rank 2 failed: corrupt"):
        watched.team.go(2, 200)
    watched.team.close()
    watched.check_gone()


def test_a_rank_says_nothing_while_it_starts(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "say('ready') if rank == 1 else None; time.sleep(60)", timeout_s=0.3)
    watched.team.begin()
    with pytest.raises(RankFailed, match=r"ranks \[2\] said nothing for 0\.3 s while they started"):
        watched.team.go(2, 200)


def test_a_rank_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.ranks.team.CLOSE_S", 0.2)
    watched = Watched(tmp_path, "say('ready'); hear(); time.sleep(60)")
    watched.start()
    began = time.monotonic()
    watched.team.close()
    assert time.monotonic() - began < 5
    watched.check_gone()


def test_a_stopped_rank_takes_no_plans(tmp_path: Path) -> None:
    """It is alive, so only the time limit tells."""
    watched = Watched(tmp_path, serving("None"), timeout_s=0.3)
    watched.start()
    send: Callable[[], None] = lambda: watched.team.send(PLAN)  # noqa: E731
    send(), send()
    with pytest.raises(RankFailed, match=r"ranks \[1, 2\] did not take a plan within 0\.3 s"):
        send()  # the scripts never count what they read
    watched.team.close()
    watched.check_gone()


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Team([squad((str(tmp_path / "nothing"),))], 1.0, lambda failure: None)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors as Linux shows them")
@pytest.mark.parametrize("has_started", [True, False])
def test_a_team_leaves_no_descriptor_open(tmp_path: Path, has_started: bool) -> None:
    before = set(os.listdir("/proc/self/fd"))
    if has_started:
        watched = Watched(tmp_path, "def plan_came(): pass\n" + SERVE)
        watched.start()
        watched.team.close()
        watched.team.close()
        del watched  # its ring is memory, which goes with it
        gc.collect()
    else:
        with pytest.raises(FileNotFoundError):
            Team([squad((str(tmp_path / "no-such-program"),))], 1.0, lambda failure: None)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_process_with_many_descriptors(tmp_path: Path, many_descriptors: None) -> None:
    watched = Watched(tmp_path, serving("None"))
    assert max(mate.link.fileno() for mate in watched.team._mates) > 1023
    watched.start()
    os.kill(child_pids(watched.team)[0], signal.SIGKILL)
    watched.check_lost("rank 1 was killed by SIGKILL")


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """So many that new ones are beyond what select() knows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("this system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1200, hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < 1024:
        taken.append(os.dup(taken[0]))
    yield
    for fd in taken:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_start_that_is_interrupted_leaves_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C in a notebook, say, whose process goes on."""

    class Interrupted(queue.SimpleQueue):  # type: ignore[type-arg]
        def get(self) -> None:  # type: ignore[override]
            raise KeyboardInterrupt

    (tmp_path / "mate.py").write_text(BEGIN + SERVE)
    started = squad((sys.executable, "-S", str(tmp_path / "mate.py")))
    monkeypatch.setattr(queue, "SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        Team([started], 1.0, lambda failure: None)
    assert started._mates
    assert all(mate.life.wait(0) is not None for mate in started._mates)
