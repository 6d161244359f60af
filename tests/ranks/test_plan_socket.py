"""Plans over TCP: order, how many are under way, time limits, ends; and who may call."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from gapless.core.request import IntArray
from gapless.errors import RankFailed
from gapless.ranks.desk import LINK, PLANS, Desk, DeskAddress, DeskCall, call
from gapless.ranks.plan_socket import PlanReceiver, PlanSender

HOST = "127.0.0.1"


class Ends:
    """Rank 0's end, and those of ranks 2 and 3."""

    def __init__(self) -> None:
        pairs = {rank: socket.socketpair() for rank in (2, 3)}
        self.ours = {rank: pair[0] for rank, pair in pairs.items()}
        self.theirs = {rank: pair[1] for rank, pair in pairs.items()}
        self.sender = PlanSender(self.ours, num_places=2, timeout_s=0.1)
        self.receivers = [PlanReceiver(end, place_words=100_000) for end in self.theirs.values()]

    def write(self, *words: int) -> None:
        self.sender.write(np.array(words, np.int32))


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends()
    yield found
    for end in (*found.ours.values(), *found.theirs.values()):
        end.close()


def listed(words: IntArray | None) -> list[int] | None:
    return None if words is None else words.tolist()


def test_every_rank_gets_every_plan_in_order(ends: Ends) -> None:
    for turn in range(10):
        ends.write(turn, -turn)
        ends.write()
        for receiver in ends.receivers:
            assert [listed(receiver.read()), listed(receiver.read())] == [[turn, -turn], []]


def test_as_many_plans_are_under_way_as_there_are_places(ends: Ends) -> None:
    ends.write(1)
    ends.write(2)
    for _ in range(2):
        ends.receivers[0].read()
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"^ranks \[3\] did not take a plan within 0\.1 s$"):
        ends.write(3)
    assert time.monotonic() - began < 2
    assert listed(ends.receivers[1].read()) == [1]
    ends.write(3)
    assert [listed(ends.receivers[1].read()) for _ in range(2)] == [[2], [3]]


def test_a_plan_that_the_network_does_not_take(ends: Ends) -> None:
    """It is larger than the buffers of the system, and nobody reads."""
    with pytest.raises(RankFailed, match=r"^ranks \[2\] did not take a plan within 0\.1 s$"):
        ends.sender.write(np.zeros(1 << 22, np.int32))


def test_a_large_plan_arrives_whole(ends: Ends) -> None:
    words = np.arange(100_000, dtype=np.int32)
    found: list[IntArray | None] = []
    threads = [threading.Thread(target=lambda r=r: found.append(r.read())) for r in ends.receivers]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    ends.sender.write(words)
    for thread in threads:
        thread.join(5)
    assert all(np.array_equal(words, one) for one in found if one is not None)
    assert len(found) == 2


def test_a_plan_larger_than_any_is_refused(ends: Ends) -> None:
    ends.ours[2].sendall(np.array([100_001], "<i8").tobytes())
    with pytest.raises(RankFailed, match="a plan of 100001 words came"):
        ends.receivers[0].read()


def test_the_end_comes_behind_what_was_written(ends: Ends) -> None:
    ends.write(1)
    for end in ends.ours.values():
        end.shutdown(socket.SHUT_WR)
    for receiver in ends.receivers:
        assert listed(receiver.read()) == [1]
        assert receiver.read() is None


def test_a_rank_that_is_gone_hurts_nobody_here(ends: Ends) -> None:
    """The team misses it."""
    ends.theirs[2].close()
    for word in range(5):
        ends.write(word)
        assert listed(ends.receivers[1].read()) == [word]


def test_the_desk_takes_ranks_that_know_the_token() -> None:
    desk = Desk(HOST, 10.0)
    address = desk.address
    wrong = DeskAddress(HOST, address.port, bytes(32))
    silent = socket.create_connection((HOST, address.port))
    half = socket.create_connection((HOST, address.port))
    half.sendall(address.token[:20])
    stranger = call(wrong, 1, LINK, 10.0)
    friends = [call(address, rank, part, 10.0) for rank in (1, 2) for part in (LINK, PLANS)]
    calls = take(desk, 4)
    assert {(one.rank, one.part) for one in calls} == {(1, LINK), (1, PLANS), (2, LINK), (2, PLANS)}
    stranger.settimeout(5)
    assert stranger.recv(1) == b"", "hung up"
    friends[0].sendall(b"x")
    (first,) = [one.end for one in calls if (one.rank, one.part) == (1, LINK)]
    assert first.recv(9) == b"x", "the greeting is not part of what is said"
    desk.close()
    assert silent.recv(1) == half.recv(1) == b""
    for end in (silent, half, stranger, *friends, *(one.end for one in calls)):
        end.close()


def take(desk: Desk, count: int) -> list[DeskCall]:
    found: list[DeskCall] = []
    deadline = time.monotonic() + 5
    while len(found) < count and time.monotonic() < deadline:
        found += desk.calls(0.1)
    return found + list(desk.calls(0.05))
