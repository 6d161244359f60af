"""Ranks of this machine: child processes, which get their plans through a ring in shared memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gapless.child import spawn
from gapless.core.request import IntArray
from gapless.ranks.link import Link
from gapless.ranks.mate import Mate, how_it_ended
from gapless.ranks.ring import RingShape, RingWriter, shared_memory

COMMAND = (sys.executable, "-m", "gapless.pipeline.follower")


@dataclass(frozen=True, slots=True)
class ChildLife:
    """A child of this process."""

    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout_s: float) -> str | None:
        try:
            return how_it_ended(self.process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            return None


class LocalSquad:
    """A child dies with the thread that started it, so that thread must live as long as the ranks do."""

    def __init__(
        self, ranks: Sequence[int], own_address: str, timeout_s: float, command: Sequence[str] = COMMAND
    ) -> None:
        """own_address: by which other ranks reach those of this machine."""
        self._ranks, self._address, self._timeout_s, self._command = ranks, own_address, timeout_s, command
        self._memory = shared_memory()
        self._mates: list[Mate] = []
        self._bells: list[int] = []
        self._ring: RingWriter | None = None

    def start(self) -> Iterator[Mate]:
        for place, rank in enumerate(self._ranks, 1):  # rank 0 has the first GPU
            self._mates.append(self._start(rank, place))
            yield self._mates[-1]

    def _start(self, rank: int, place: int) -> Mate:
        ours, theirs = socket.socketpair()
        listening, bell = os.pipe()
        os.set_blocking(bell, False)
        self._bells.append(bell)
        try:
            process = spawn(self._command, (theirs.fileno(), listening, self._memory))
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(listening)
        return Mate(rank, f"rank {rank}", ChildLife(process), Link(ours), {"gpu": place, "own": self._address})

    def open(self, num_places: int, place_words: int) -> None:
        shape = RingShape(len(self._ranks), num_places, place_words)
        self._ring = RingWriter(self._memory, shape, self._ranks, self._bells, self._timeout_s)
        for reader, mate in enumerate(self._mates):
            sizes = {"num_readers": len(self._ranks), "num_places": num_places, "place_words": place_words}
            mate.link.send("go", reader=reader, **sizes)

    def write(self, words: IntArray) -> None:
        assert self._ring is not None, "the ranks are not ready"
        self._ring.write(words)

    def hang_up(self) -> None:
        while self._bells:
            os.close(self._bells.pop())

    def close(self) -> None:
        os.close(self._memory)
