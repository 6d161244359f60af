"""A ring of places in shared memory, through which rank 0 hands plans to the other ranks of its machine.

It has as many places as there may be steps in flight. The writer fills a place once every reader has copied what was in
it, and rings each reader's bell, a pipe. A reader sleeps on its bell; a closed bell means that nothing more will come.

    read [num_readers] int64 | sizes [num_places] int64 | places [num_places, place_words] int32
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gapless.core.request import IntArray
from gapless.errors import RankFailed

_RING = b"\1"
_PAUSE_S = 1e-4


@dataclass(frozen=True, slots=True)
class RingShape:
    """The sizes of a ring."""

    num_readers: int
    num_places: int
    place_words: int

    @property
    def num_bytes(self) -> int:
        return 8 * (self.num_readers + self.num_places) + 4 * self.num_places * self.place_words


class _Memory:
    """Views of the shared pages."""

    def __init__(self, fd: int, shape: RingShape) -> None:
        pages = mmap.mmap(fd, shape.num_bytes)
        readers, places = shape.num_readers, shape.num_places
        self.read = np.frombuffer(pages, np.int64, readers)  # [num_readers] plans that each of them has copied
        self.sizes = np.frombuffer(pages, np.int64, places, 8 * readers)
        words = np.frombuffer(pages, np.int32, places * shape.place_words, 8 * (readers + places))
        self.places = words.reshape(places, shape.place_words)


def shared_memory() -> int:
    """A descriptor of memory that has no name, so that nothing is left behind, however its users end."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("gapless-ring")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class RingWriter:
    """Rank 0's end."""

    def __init__(self, fd: int, shape: RingShape, ranks: Sequence[int], bells: Sequence[int], timeout_s: float) -> None:
        """ranks, bells: of each reader."""
        os.ftruncate(fd, shape.num_bytes)
        self._memory, self._shape, self._timeout_s = _Memory(fd, shape), shape, timeout_s
        self._ranks, self._bells = ranks, bells
        self._num_written = 0

    def write(self, words: IntArray) -> None:
        """Fill a place, and tell the readers. Raises RankFailed where one of them does not make room in time."""
        self._wait_for_room()
        place = self._num_written % self._shape.num_places
        self._memory.places[place, : len(words)] = words
        self._memory.sizes[place] = len(words)
        self._num_written += 1
        for bell in self._bells:
            with contextlib.suppress(OSError):  # a reader that is gone is missed elsewhere
                os.write(bell, _RING)

    def _wait_for_room(self) -> None:
        least = self._num_written - self._shape.num_places + 1  # that everybody has read: the place is free then
        deadline = time.monotonic() + self._timeout_s
        while int(self._memory.read.min()) < least:
            if time.monotonic() > deadline:
                late = [rank for rank, read in zip(self._ranks, self._memory.read, strict=True) if read < least]
                raise RankFailed(f"ranks {late} did not take a plan within {self._timeout_s:g} s")
            time.sleep(_PAUSE_S)


class RingReader:
    """The end of any other rank."""

    def __init__(self, fd: int, shape: RingShape, reader: int, bell: int) -> None:
        self._memory, self._shape = _Memory(fd, shape), shape
        self._reader, self._bell = reader, bell
        self._num_rung = self._num_read = 0

    def read(self) -> IntArray | None:
        """Wait for the next plan, and copy its words; None when there will be no more."""
        while self._num_rung == self._num_read:
            rung = len(os.read(self._bell, 64))
            if rung == 0:
                return None
            self._num_rung += rung
        place = self._num_read % self._shape.num_places
        words: IntArray = self._memory.places[place, : self._memory.sizes[place]].copy()
        self._num_read += 1
        self._memory.read[self._reader] = self._num_read
        return words
