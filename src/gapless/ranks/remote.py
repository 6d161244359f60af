"""Ranks on other nodes: each has a seat there, whose process calls rank 0 and gets its plans over TCP.

Does not know who gives the seats (see `ray_seats`).
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from gapless.core.request import IntArray
from gapless.errors import RankFailed
from gapless.ranks.desk import LINK, PLANS, Desk, DeskAddress
from gapless.ranks.link import Link
from gapless.ranks.mate import Mate, RankLife
from gapless.ranks.plan_socket import PlanSender

START_S = 60.0  # for the process of a seat to call
_LOOK_S = 0.2


class Seat(Protocol):
    """Room for one rank on a node."""

    rank: int
    node: str  # its address

    def sit(self, address: DeskAddress) -> RankLife:
        """Have its process start and call. Does not wait for it."""


class RemoteSquad:
    """The ranks that sit elsewhere."""

    def __init__(self, seats: Sequence[Seat], host: str, timeout_s: float, release: Callable[[], None]) -> None:
        """host: of rank 0, as they reach it. release: called when the seats are needed no more."""
        self._seats, self._timeout_s, self._release = seats, timeout_s, release
        self._desk = Desk(host, timeout_s)
        self._plans: dict[int, socket.socket] = {}  # by rank
        self._mates: list[Mate] = []
        self._sender: PlanSender | None = None

    def start(self) -> Iterator[Mate]:
        """Raises RankFailed if one of them does not call in time."""
        lives = {seat.rank: (seat, seat.sit(self._desk.address)) for seat in self._seats}
        links: dict[int, socket.socket] = {}
        deadline = time.monotonic() + START_S
        try:
            while lives:
                for call in self._desk.calls(_LOOK_S):
                    {LINK: links, PLANS: self._plans}[call.part][call.rank] = call.end
                for rank in links.keys() & self._plans.keys() & lives.keys():
                    yield self._welcome(*lives.pop(rank), links.pop(rank))
                for seat, life in lives.values():
                    self._check(seat, life, deadline)
        finally:
            for end in links.values():
                end.close()
            for _, life in lives.values():
                life.kill()

    def _welcome(self, seat: Seat, life: RankLife, link: socket.socket) -> Mate:
        own = {"gpu": None, "own": seat.node}
        self._mates.append(Mate(seat.rank, _name(seat), life, Link(link), own))
        return self._mates[-1]

    def _check(self, seat: Seat, life: RankLife, deadline: float) -> None:
        if (end := life.wait(0)) is not None:
            raise RankFailed(f"{_name(seat)} {end} before it called")
        if time.monotonic() > deadline:
            host = self._desk.address.host
            raise RankFailed(f"{_name(seat)} did not call within {START_S:g} s; can it reach {host}?")

    def open(self, num_places: int, place_words: int) -> None:
        self._sender = PlanSender(self._plans, num_places, self._timeout_s)
        for mate in self._mates:
            mate.link.send("go", place_words=place_words)

    def write(self, words: IntArray) -> None:
        assert self._sender is not None, "the ranks are not ready"
        self._sender.write(words)

    def hang_up(self) -> None:
        for end in self._plans.values():
            with contextlib.suppress(OSError):  # it is gone
                end.shutdown(socket.SHUT_WR)  # behind what was written; close() would drop it if an answer is unread

    def close(self) -> None:
        self._desk.close()
        for end in self._plans.values():
            end.close()
        self._release()


def _name(seat: Seat) -> str:
    return f"rank {seat.rank} on node {seat.node}"
