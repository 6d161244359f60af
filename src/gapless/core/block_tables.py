"""The block table of each row, and what the plan in the making adds to them.

Only the scheduler calls this. Writes `blocks` and `num_blocks` of the rows; which block is free, the pool knows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import numpy as np

from gapless.core.block_pool import BlockPool
from gapless.core.request import IntArray, RowTable

NO_BLOCKS = np.empty((0, 3), np.int32)


class BlockTables:
    """Tables that grow, and the entries that the device does not have yet."""

    def __init__(self, rows: RowTable, pool: BlockPool, block_size: int) -> None:
        self._rows = rows
        self._pool = pool
        self._size = block_size
        self._new: list[tuple[int, int, int]] = []  # row, index in its table, block

    @property
    def num_new(self) -> int:
        return len(self._new)

    def begin_plan(self) -> None:
        self._new.clear()

    def share(self, row: int, blocks: Sequence[int]) -> None:
        """The row begins with blocks that others have too."""
        self._pool.share(blocks)
        for index, block in enumerate(blocks):
            self._append(row, index, block)

    def grow(self, row: int, length: int, make_room: Callable[[], bool]) -> int:
        """Give the row blocks for `length` tokens, and return how many tokens then fit past its cursor.

        `make_room` is called when no block is free, and says whether it freed any.
        """
        size, count = self._size, int(self._rows.num_blocks[row])
        while count * size < length:
            block = self._pool.allocate()
            if block is not None:
                self._append(row, count, block)
                count += 1
            elif not make_room():
                break
        return max(0, min(length, count * size) - int(self._rows.cursor[row]))

    def release(self, row: int) -> None:
        """The row's owner has left."""
        self._pool.release(self.blocks_of(row))

    def blocks_of(self, row: int) -> list[int]:
        blocks: list[int] = self._rows.blocks[row, : self._rows.num_blocks[row]].tolist()
        return blocks

    def take_new(self, lost: Container[int]) -> IntArray:
        """The plan's new entries [n, 3], without those of rows that were lost meanwhile."""
        kept = [entry for entry in self._new if entry[0] not in lost]
        return np.array(kept, np.int32) if kept else NO_BLOCKS

    def _append(self, row: int, index: int, block: int) -> None:
        self._rows.blocks[row, index] = block
        self._rows.num_blocks[row] = index + 1
        self._new.append((row, index, block))
