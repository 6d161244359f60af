"""Plans on their way to ranks of other nodes: one TCP connection a rank, with the interface of the ring.

    to the rank: num_words (int64, little-endian) | words (int32), for each plan    back: one byte for each plan taken

As many plans are under way as there are places. A closed connection means that nothing more will come.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping

import numpy as np

from gapless.core.request import IntArray
from gapless.errors import RankFailed
from gapless.ranks.link import readable

_HEAD = struct.Struct("<q")
_TAKEN = b"\1"


class _End:
    """The connection of one rank."""

    def __init__(self, rank: int, end: socket.socket) -> None:
        self.rank, self.socket = rank, end
        self.num_under_way = 0
        self.is_gone = False  # which is missed elsewhere

    def hear(self) -> None:
        """To be called when it can be read."""
        try:
            taken = len(self.socket.recv(64))
        except OSError:
            taken = 0
        self.num_under_way -= taken
        self.is_gone = self.is_gone or not taken

    def send(self, data: bytes) -> None:
        """Raises TimeoutError."""
        try:
            self.socket.sendall(data)
        except TimeoutError:
            raise
        except OSError:
            self.is_gone = True
        self.num_under_way += 1


class PlanSender:
    """Rank 0's end."""

    def __init__(self, ends: Mapping[int, socket.socket], num_places: int, timeout_s: float) -> None:
        """ends: by rank."""
        self._ends = [_End(rank, end) for rank, end in ends.items()]
        self._num_places, self._timeout_s = num_places, timeout_s
        for end in ends.values():
            end.settimeout(timeout_s)

    def write(self, words: IntArray) -> None:
        """Send a plan to every rank. Raises RankFailed where one of them does not take plans in time."""
        self._wait_for_room()
        data = _HEAD.pack(len(words)) + words.astype("<i4", copy=False).tobytes()
        for end in self._ends:
            try:
                end.send(data)
            except TimeoutError:
                raise self._late([end.rank]) from None

    def _wait_for_room(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while full := {end.socket.fileno(): end for end in self._ends if self._is_full(end)}:
            heard = readable(list(full), max(0.0, deadline - time.monotonic()))
            if not heard:
                raise self._late([end.rank for end in full.values()])
            for fd in heard:
                full[fd].hear()

    def _is_full(self, end: _End) -> bool:
        return not end.is_gone and end.num_under_way >= self._num_places

    def _late(self, ranks: list[int]) -> RankFailed:
        return RankFailed(f"ranks {ranks} did not take a plan within {self._timeout_s:g} s")


class PlanReceiver:
    """The end of any other rank."""

    def __init__(self, end: socket.socket, place_words: int) -> None:
        self._socket, self._place_words = end, place_words

    def read(self) -> IntArray | None:
        """Wait for the next plan; None when there will be no more."""
        head = bytearray(_HEAD.size)
        if not self._fill(memoryview(head)):
            return None
        (num_words,) = _HEAD.unpack(head)
        if not 0 <= num_words <= self._place_words:
            raise RankFailed(f"a plan of {num_words} words came, and there is room for {self._place_words}")
        data = bytearray(4 * num_words)
        if not self._fill(memoryview(data)):
            return None
        self._answer()
        return np.frombuffer(data, "<i4").astype(np.int32, copy=False)

    def _fill(self, out: memoryview) -> bool:
        """False where the connection ends before."""
        while len(out):
            try:
                count = self._socket.recv_into(out)
            except OSError:
                return False
            if not count:
                return False
            out = out[count:]
        return True

    def _answer(self) -> None:
        try:
            self._socket.sendall(_TAKEN)
        except OSError:
            return  # the next read tells
