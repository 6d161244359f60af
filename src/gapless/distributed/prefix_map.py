"""Which replica probably has which prefix in its cache: hashes of the blocks of the prompts that were sent there.

Approximate on purpose. A replica drops its least recently used blocks when its memory is full, so the map does the same
with a capacity like the replica's, and nobody has to report evictions. A block's hash includes all tokens before it and
is the same in every process. Owns the hashes. Knows no loads.

    hash of a block    replicas 7 6 5 4 3 2 1 0
    system prompt               . . 1 . 1 1 . 1        one integer a block, one bit a replica
    first question              . . 1 . . 1 . .        a prefix ends where its bits end
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from gapless.core.prefix_hashes import prefix_hashes

BLOCK_TOKENS = 64  # of one hash: small beside a system prompt, large beside the work for one hash

TokenCounts = npt.NDArray[np.int64]


class PrefixMap:
    """Replicas are small numbers, their slots."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        self.block_tokens = block_tokens
        self._holders: dict[bytes, int] = {}  # a bit for each slot that has the block
        self._recent: dict[int, OrderedDict[bytes, None]] = {}  # blocks of each slot, the least recently used first
        self._capacity: dict[int, int] = {}  # in blocks

    def __len__(self) -> int:
        """Different blocks that some replica has."""
        return len(self._holders)

    def join(self, slot: int, num_tokens: int) -> None:
        """A replica with an empty cache for this many tokens."""
        self._recent[slot] = OrderedDict()
        self._capacity[slot] = num_tokens // self.block_tokens

    def leave(self, slot: int) -> None:
        """Nothing of this replica is known any more."""
        self.forget(slot, self._recent.pop(slot))
        del self._capacity[slot]

    def hashes(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> list[bytes]:
        """The hashes of all full blocks."""
        return prefix_hashes(tokens, self.block_tokens)

    def num_cached(self, hashes: Sequence[bytes], num_slots: int) -> TokenCounts:
        """How many tokens of these blocks each slot has, from the first block on."""
        found = np.zeros(num_slots, np.int64)
        alive = (1 << num_slots) - 1
        for number, each in enumerate(hashes):
            still = alive & self._holders.get(each, 0)
            if still != alive:
                found[_slots(alive & ~still, num_slots)] = number * self.block_tokens
                alive = still
            if not alive:
                return found
        found[_slots(alive, num_slots)] = len(hashes) * self.block_tokens
        return found

    def touch(self, slot: int, hashes: Sequence[bytes]) -> None:
        """The replica computes or reads these blocks. The end of a prefix is dropped before its start."""
        recent, bit = self._recent[slot], 1 << slot
        for each in reversed(hashes):
            if each in recent:
                recent.move_to_end(each)
            else:
                recent[each] = None
                self._holders[each] = self._holders.get(each, 0) | bit
        self.forget(slot, [recent.popitem(last=False)[0] for _ in range(len(recent) - self._capacity[slot])])

    def forget(self, slot: int, hashes: Iterable[bytes]) -> None:
        """The replica does not have these blocks any more."""
        recent, bit = self._recent.get(slot), 1 << slot  # None: it is leaving
        for each in hashes:
            if recent is not None:
                recent.pop(each, None)
            left = self._holders.get(each, 0) & ~bit
            if left:
                self._holders[each] = left
            else:
                self._holders.pop(each, None)


def _slots(bits: int, num_slots: int) -> npt.NDArray[np.bool_]:
    """The bits as an array, bit 0 first."""
    packed = np.frombuffer(bits.to_bytes(num_slots // 8 + 1, "little"), np.uint8)
    return np.unpackbits(packed, count=num_slots, bitorder="little").astype(np.bool_)
