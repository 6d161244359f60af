"""Tracks the use of KV blocks: reference counts, the free list, and the least recently used cached blocks.

    free  --allocate-->  in use (references > 0)  --release-->  cached, if the index knows it, else free
                              ^-------- share --------------------'      '--allocate (evicts)--> in use

Owns the counts. The prefix index owns the content of blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from gapless.core.prefix_index import PrefixIndex


class BlockPool:
    """All KV blocks of one device."""

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.num_blocks = num_blocks
        self.index = index
        self.num_evictions = 0
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        # Unreferenced but findable, least recently used first. To find the first key of a plain dict takes ever longer
        # as keys before it are deleted.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def free(self) -> Sequence[int]:
        """Blocks that hold no content."""
        return self._free

    def allocate(self) -> int | None:
        """A block for exclusive use, or None when all are in use."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self.index.forget(block)
            self.num_evictions += 1
        else:
            return None
        self._references[block] = 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """Take a reference on blocks found in the index."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of these are unused now. Sharing them makes that many fewer available."""
        return sum(self._references[block] == 0 for block in blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Give references back. Later blocks of a prefix are evicted before earlier ones."""
        references, index = self._references, self.index
        for block in reversed(blocks):
            left = references[block] = references[block] - 1
            assert left >= 0, f"block {block} released more often than taken"
            if left == 0:
                if block in index:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def clear_cache(self) -> None:
        """Forget every cached content; blocks in use stay in use."""
        self.index.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert that every block is in exactly one place, and counted right. For tests and the checking mode."""
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts == self._references, "reference counts differ from the tables"
        idle = set(self._free) | set(self._cached)
        assert len(idle) == len(self._free) + len(self._cached), "a block is free twice"
        assert idle == {b for b in range(self.num_blocks) if counts[b] == 0}, "a block leaked"
        assert all(b in self.index for b in self._cached)
        assert not any(b in self.index for b in self._free)
