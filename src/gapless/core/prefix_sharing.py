"""Blocks that several requests share because their tokens begin alike.

Finds blocks for a request that waits, and lets others find the blocks of a row once a planned step fills them with
known tokens. Blocks can be found from the plan after the one that computes them. If another request in this plan
already computes the same prefix, waiting one step is cheaper than computing it twice.
Only the scheduler calls this. Owns the chain of each row's registered blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gapless.core.block_pool import BlockPool
from gapless.core.prefix_index import ROOT, Entry, Key
from gapless.core.request import IntArray, LongArray, Request, RowTable

WORTH_A_STEP = 8  # blocks


class PrefixSharing:
    """The prefixes that rows share. Nothing is shared where the cache is off."""

    def __init__(self, rows: RowTable, pool: BlockPool, block_size: int, *, enabled: bool) -> None:
        self._rows = rows
        self._pool = pool
        self._size = block_size
        self.enabled = enabled
        self._computing: dict[Key, int] = {}  # rows of the plan in the making, by the first block not yet registered

    # -- finding -----------------------------------------------------------------------------------------------------

    def match(self, request: Request) -> list[Entry]:
        """Index entries of the blocks that hold the first tokens of the request."""
        if not self.enabled:
            return []
        tokens = findable(request)
        return self._pool.index.match(tokens, len(tokens))

    def begin_plan(self, rows: Iterable[int]) -> None:
        """A new plan computes tokens of these rows."""
        self._computing.clear()
        for row in rows:
            self.add_to_plan(row)

    def add_to_plan(self, row: int) -> None:
        """The plan computes tokens of this row too."""
        if not self.enabled:
            return
        start = int(self._rows.num_registered[row]) * self._size
        end = start + self._size
        if end <= self._rows.num_tokens[row]:
            self._computing[self._rows.prefix_entry[row], self._rows.tokens[row, start:end].tobytes()] = row

    def should_wait(self, request: Request, found: Sequence[Entry]) -> bool:
        """Whether a row of the plan computes so many of the request's tokens, beyond those that were found."""
        if not self._computing:
            return False
        tokens, num_found, entry = findable(request), len(found) * self._size, found[-1] if found else ROOT
        row = self._computing.get((entry, tokens[num_found : num_found + self._size].tobytes()))
        if row is None:
            return False
        end = min(len(tokens), int(self._rows.num_tokens[row]))
        differ = np.flatnonzero(tokens[num_found:end] != self._rows.tokens[row, num_found:end])
        num_common = int(differ[0]) if len(differ) else end - num_found
        return num_common >= WORTH_A_STEP * self._size

    # -- registering -------------------------------------------------------------------------------------------------

    def adopt(self, row: int, found: Sequence[Entry]) -> None:
        """The row begins with blocks that were found."""
        self._rows.prefix_entry[row], self._rows.num_registered[row] = found[-1] if found else ROOT, len(found)

    def register(self, row: int) -> None:
        """Let others find the row's blocks that are full of facts and written by a planned or launched step."""
        if not self.enabled:
            return
        rows, size = self._rows, self._size
        first, full = rows.num_registered[row], min(rows.cursor.item(row), rows.num_tokens.item(row)) // size
        if full > first:
            tokens, blocks = rows.tokens[row, first * size : full * size], rows.blocks[row, first:full].tolist()
            rows.prefix_entry[row] = self._pool.index.insert(rows.prefix_entry[row], tokens, blocks)
            rows.num_registered[row] = full

    def register_full(self, rows: LongArray, num_tokens: LongArray) -> None:
        """The same for those of the rows whose last known token begins a new block."""
        if self.enabled:
            for row in rows[(num_tokens - 1) % self._size == 0].tolist():
                self.register(row)

    def check(self, rows: Iterable[int]) -> None:
        """Assert that nobody can find a block whose tokens nobody knows yet, or that was given back before."""
        for row in rows:
            assert self._rows.num_registered[row] * self._size <= self._rows.num_tokens[row]
            first = max(self._rows.first_blocks[row], default=0)
            assert not self.enabled or first <= self._rows.num_registered[row], f"row {row} gave back unknown blocks"


def findable(request: Request) -> IntArray:
    """Its first tokens, those that may come from the cache."""
    length = len(request.tokens) - 1  # one is left to compute: its logits
    if request.lacks_prompt_scores:  # positions that are found in the cache have no logits
        length = min(length, request.num_prompt_scores)
    return request.tokens[:length]
