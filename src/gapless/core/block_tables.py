"""The block table of each row, and what the plan in the making adds to them.

Only the scheduler calls this. Writes `blocks` and `num_blocks` of the rows; which block is free, the pool knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from gapless.core.block_pool import BlockPool
from gapless.core.request import IntArray, LongArray, RowTable

NO_BLOCKS = np.empty((0, 3), np.int32)


class BlockTables:
    """Tables that grow, and the entries that the device does not have yet."""

    def __init__(self, rows: RowTable, pool: BlockPool, block_size: int) -> None:
        self._rows = rows
        self._pool = pool
        self._size = block_size
        self._new: list[IntArray] = []  # [n, 3] each: row, index in its table, block
        self.num_new = 0

    def begin_plan(self) -> None:
        self._new.clear()
        self.num_new = 0

    def share(self, row: int, blocks: Sequence[int]) -> None:
        """The row begins with blocks that others have too."""
        self._pool.share(blocks)
        self._append(row, np.arange(len(blocks)), blocks)

    def grow(self, row: int, length: int, make_room: Callable[[], bool]) -> int:
        """Give the row blocks for `length` tokens, and return how many tokens then fit past its cursor.

        `make_room` is called when no block is free, and says whether it freed any.
        """
        first = int(self._rows.num_blocks[row])
        num_missing = -(-length // self._size) - first
        blocks: list[int] = []
        while len(blocks) < num_missing:
            block = self._pool.allocate()
            if block is not None:
                blocks.append(block)
            elif not make_room():
                break
        count = first + len(blocks)
        self._append(row, np.arange(first, count), blocks)
        return max(0, min(length, count * self._size) - int(self._rows.cursor[row]))

    def grow_each(self, rows: LongArray) -> None:
        """Give each of the rows one more block. The pool must have as many."""
        blocks = [block for _ in range(len(rows)) if (block := self._pool.allocate()) is not None]
        self._append(rows, self._rows.num_blocks[rows], blocks)

    def release(self, row: int) -> None:
        """The row's owner has left."""
        self._pool.release(self.blocks_of(row))

    def blocks_of(self, row: int) -> list[int]:
        blocks: list[int] = self._rows.blocks[row, : self._rows.num_blocks[row]].tolist()
        return blocks

    def take_new(self, lost: Collection[int]) -> IntArray:
        """The plan's new entries [n, 3], without those of rows that were lost meanwhile."""
        if not self._new:
            return NO_BLOCKS
        found = np.concatenate(self._new)
        return found[~np.isin(found[:, 0], list(lost))] if lost else found

    def _append(self, rows: int | LongArray, indices: LongArray, blocks: Sequence[int]) -> None:
        """Add blocks to the table of a row, or one to each of several, at these indices."""
        if len(blocks) == 0:
            return
        new = np.empty((len(blocks), 3), np.int32)
        new[:, 0], new[:, 1], new[:, 2] = rows, indices, blocks
        self._rows.blocks[rows, indices] = new[:, 2]
        self._rows.num_blocks[rows] += len(blocks) if isinstance(rows, int) else 1
        self._new.append(new)
        self.num_new += len(blocks)
