"""A team of ranks here and elsewhere. Elsewhere is a process of this machine that calls by TCP, as a seat's does."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_team import BEGIN, PLAN, SERVE

from gapless.errors import RankFailed
from gapless.ranks import remote
from gapless.ranks.desk import LINK, PLANS, DeskAddress, call
from gapless.ranks.local import ChildLife, LocalSquad
from gapless.ranks.mate import RankLife
from gapless.ranks.remote import RemoteSquad
from gapless.ranks.team import Team

HOST = "127.0.0.1"
TAKE = """
def take(count):
    found = b""
    while len(found) < count:
        data = plans.recv(count - len(found))
        if not data: os._exit(0)
        found += data
    return found
say("ready"); hear()
plans = socket.socket(fileno=bell)
while True:
    size = int.from_bytes(take(8), "little"); take(4 * size); plans.sendall(b"x")
    plan_came()
"""


class ScriptSeat:
    """A seat whose process is a script."""

    node = "elsewhere"

    def __init__(self, rank: int, script: Path, *, calls: bool = True) -> None:
        self.rank, self._script, self._calls = rank, script, calls

    def sit(self, address: DeskAddress) -> RankLife:
        ends = [call(address, self.rank, part, 10.0) for part in (LINK, PLANS)] if self._calls else [socket.socket()]
        fds = [end.fileno() for end in ends]
        process = subprocess.Popen([sys.executable, "-S", str(self._script), *map(str, fds)], pass_fds=fds)
        for end in ends:
            end.close()
        return ChildLife(process)


class Mixed:
    """Rank 1 here, rank 2 elsewhere."""

    def __init__(self, folder: Path, answer: str, timeout_s: float = 10.0, *, calls: bool = True) -> None:
        (folder / "near.py").write_text(f"{BEGIN}\ndef plan_came(): note('near')\n{NOTE.format(folder)}{SERVE}")
        (folder / "far.py").write_text(f"{BEGIN}\ndef plan_came(): {answer}\n{NOTE.format(folder)}{TAKE}")
        self.alarms: queue.SimpleQueue[RankFailed] = queue.SimpleQueue()
        self.released: list[bool] = []
        near = LocalSquad([1], HOST, timeout_s, (sys.executable, "-S", str(folder / "near.py")))
        seat = ScriptSeat(2, folder / "far.py", calls=calls)
        far = RemoteSquad([seat], HOST, timeout_s, lambda: self.released.append(True))
        self.team = Team([near, far], timeout_s, self.alarms.put)

    def start(self) -> None:
        self.team.begin(word="x")
        self.team.go(num_places=2, place_words=200)


NOTE = "def note(name): open(r'{}/' + name + '.txt', 'a').write('x')\n"


def test_plans_reach_ranks_here_and_elsewhere(tmp_path: Path) -> None:
    mixed = Mixed(tmp_path, "note('far')")
    mixed.start()
    for _ in range(2):
        mixed.team.send(PLAN)
    mixed.team.close()
    assert (tmp_path / "near.txt").read_text() == (tmp_path / "far.txt").read_text() == "xx"
    assert mixed.released == [True]
    assert mixed.alarms.empty()


def test_a_rank_elsewhere_is_lost(tmp_path: Path) -> None:
    mixed = Mixed(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    mixed.start()
    mixed.team.send(PLAN)
    failure = mixed.alarms.get(timeout=10)
    assert str(failure) == "rank 2 on node elsewhere was killed by SIGKILL; the group of 3 ranks has ended"
    with pytest.raises(RankFailed):
        mixed.team.send(PLAN)
    mixed.team.close()
    assert mixed.released == [True]


def test_a_rank_elsewhere_dies_before_it_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "START_S", 10.0)
    with pytest.raises(RankFailed, match="rank 2 on node elsewhere exited with status 1 before it called"):
        Mixed(tmp_path, "None", calls=False)


def test_a_rank_elsewhere_does_not_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "START_S", 0.3)
    monkeypatch.setattr(ScriptSeat, "sit", lambda seat, address: ChildLife(subprocess.Popen(["sleep", "60"])))
    with pytest.raises(RankFailed, match=r"rank 2 on node elsewhere did not call within 0\.3 s; can it reach 127"):
        Mixed(tmp_path, "None")
