"""Ids that must not stand in a file twice, at sixteen bytes or so an id: a run may have millions."""

from __future__ import annotations

import hashlib

import numpy as np


class SeenIds:
    """A set of texts that can only grow. It keeps 64 bits of each: two of a million are mixed up once in 10^7 files."""

    def __init__(self) -> None:
        self._slots = np.zeros(1024, np.uint64)  # [a power of two] open addressing; 0: free
        self._num_seen = 0

    def add(self, text: str) -> bool:
        """Whether it is new."""
        key = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()) or 1
        if not self._put(key):
            return False
        self._num_seen += 1
        if 3 * self._num_seen > 2 * len(self._slots):
            earlier = self._slots[self._slots > 0]
            self._slots = np.zeros(2 * len(self._slots), np.uint64)
            for each in earlier:
                self._put(int(each))
        return True

    def _put(self, key: int) -> bool:
        slots, last = self._slots, len(self._slots) - 1
        place = key & last
        while (found := int(slots[place])) != 0:
            if found == key:
                return False
            place = (place + 1) & last
        slots[place] = key
        return True
