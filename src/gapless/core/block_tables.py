"""The block tables of each row, one for each group of layers, and what the plan in the making adds to them.

All tables of a row are equally long. A group with a window holds only the last part of its own: what no later token can
see is given back. A step that still reads it was launched before any step that may write it (one compute stream).
Only the scheduler calls this. Writes `blocks`, `num_blocks` and `first_blocks` of the rows; which block is free, the
pool knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from gapless.core.block_pool import BlockPool
from gapless.core.limits import Limits
from gapless.core.prefix_index import Entry
from gapless.core.request import IntArray, LongArray, RowTable
from gapless.core.windows import first_block, sliding

FIRST_BLOCK = 2  # words of a new entry before its blocks


class BlockTables:
    """Tables that grow, and the entries that the device does not have yet."""

    def __init__(self, rows: RowTable, pool: BlockPool, limits: Limits) -> None:
        self._rows = rows
        self._pool = pool
        self._size = limits.block_size
        self._num_groups = limits.num_groups
        self._sliding = list(sliding(limits.windows))
        self._nobody = limits.num_blocks  # a block that exists and has no owner
        self._none = np.empty((0, FIRST_BLOCK + limits.num_groups), np.int32)
        self._new: list[IntArray] = []  # [n, 2 + num_groups] each: row, index in its tables, block of each group
        self.num_new = 0

    def begin_plan(self) -> None:
        self._new.clear()
        self.num_new = 0

    def held(self, entries: Sequence[Entry]) -> list[int]:
        """The blocks that a row shares which begins behind these entries."""
        if not self._sliding:
            return [block for entry in entries for block in entry.blocks]
        table = self._table(entries)
        held: list[int] = table[table != self._nobody].tolist()
        return held

    def share(self, row: int, entries: Sequence[Entry]) -> None:
        """The row begins with blocks that others have too."""
        self._append(row, np.arange(len(entries)), self._table(entries))
        for column, (window, _) in enumerate(self._sliding):
            self._rows.first_blocks[row, column] = first_block(len(entries) * self._size, window, self._size)
        self._pool.share(self.blocks_of(row))

    def _table(self, entries: Sequence[Entry]) -> IntArray:
        """The tables [n, num_groups] of a row that begins behind these entries."""
        table = self._in_groups([block for entry in entries for block in entry.blocks])
        for window, groups in self._sliding:
            table[: first_block(len(entries) * self._size, window, self._size), groups] = self._nobody
        return table

    def grow(self, row: int, length: int, make_room: Callable[[], bool]) -> int:
        """Give the row blocks for `length` tokens, and return how many tokens then fit past its cursor.

        `make_room` is called when too few blocks are free, and says whether it freed any.
        """
        first = int(self._rows.num_blocks[row])
        missing = (-(-length // self._size) - first) * self._num_groups
        blocks: list[int] = []
        while len(blocks) < missing:
            available = self._pool.num_available // self._num_groups * self._num_groups
            if available > 0:
                blocks += self._allocate(min(available, missing - len(blocks)))
            elif not make_room():
                break
        count = first + len(blocks) // self._num_groups
        self._append(row, np.arange(first, count), self._in_groups(blocks))
        return max(0, min(length, count * self._size) - int(self._rows.cursor[row]))

    def can_grow(self, count: int) -> bool:
        """Whether so many rows could have one more entry each."""
        return count * self._num_groups <= self._pool.num_available

    def grow_each(self, rows: LongArray) -> None:
        """Give each of the rows one more entry. The pool must have the blocks."""
        blocks = self._allocate(len(rows) * self._num_groups)
        self._append(rows, self._rows.num_blocks[rows], self._in_groups(blocks))

    def give_back(self, rows: Iterable[int]) -> None:
        """Release the blocks of these rows that no token behind the known ones can see."""
        for column, (window, groups) in enumerate(self._sliding):
            for row in rows:
                held = self._rows.first_blocks.item(row, column)
                first = first_block(self._rows.next_position(row), window, self._size)
                if first > held:
                    self._pool.release(self._rows.blocks[row, held:first, groups].ravel().tolist())
                    self._rows.first_blocks[row, column] = first

    @property
    def has_windows(self) -> bool:
        return bool(self._sliding)

    def release(self, row: int) -> None:
        """The row's owner has left."""
        self._pool.release(self.blocks_of(row))

    def blocks_of(self, row: int) -> list[int]:
        """All blocks that the row holds, by their place in the tables."""
        table = self._rows.blocks[row, : self._rows.num_blocks[row]]
        if not self._sliding:
            blocks: list[int] = table.ravel().tolist()
            return blocks
        holds = np.ones(table.shape, np.bool_)
        for column, (_, groups) in enumerate(self._sliding):
            holds[: self._rows.first_blocks[row, column], groups] = False
        held: list[int] = table[holds].tolist()
        return held

    def take_new(self, lost: Collection[int]) -> IntArray:
        """The plan's new entries [n, 2 + num_groups], without those of rows that were lost meanwhile."""
        if not self._new:
            return self._none
        found = np.concatenate(self._new)
        return found[~np.isin(found[:, 0], list(lost))] if lost else found

    def _allocate(self, count: int) -> list[int]:
        return [block for _ in range(count) if (block := self._pool.allocate()) is not None]

    def _in_groups(self, blocks: Sequence[int]) -> IntArray:
        return np.array(blocks, np.int32).reshape(-1, self._num_groups)

    def _append(self, rows: int | LongArray, indices: LongArray, blocks: IntArray) -> None:
        """Add entries [n, num_groups] to the tables of a row, or one to those of each of several, at these indices."""
        if len(blocks) == 0:
            return
        new = np.empty((len(blocks), FIRST_BLOCK + self._num_groups), np.int32)
        new[:, 0], new[:, 1], new[:, FIRST_BLOCK:] = rows, indices, blocks
        self._rows.blocks[rows, indices] = blocks
        self._rows.num_blocks[rows] += len(blocks) if isinstance(rows, int) else 1
        self._new.append(new)
        self.num_new += len(blocks)
