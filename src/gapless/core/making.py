"""The prefixes that the plan under construction already computes.

Other requests can find a block from the plan after the one that computes it. If a request in this plan already computes
a large part of the same prefix, waiting one step and sharing its blocks is cheaper. Reads rows, changes nothing.
"""

from __future__ import annotations

import numpy as np

from gapless.core.prefix_index import Key
from gapless.core.request import IntArray, RowTable

WORTH_A_STEP = 8  # blocks


class Making:
    """The rows that prefill in one plan, by the first block of each that is not in the index yet."""

    def __init__(self, rows: RowTable, block_size: int) -> None:
        self._rows = rows
        self._size = block_size
        self._row_of: dict[Key, int] = {}

    def add(self, row: int) -> None:
        """The plan computes tokens of this row."""
        start = int(self._rows.num_chained[row]) * self._size
        end = start + self._size
        if end <= self._rows.num_tokens[row]:
            self._row_of[int(self._rows.chain[row]), self._rows.tokens[row, start:end].tobytes()] = row

    def is_worth_a_step(self, tokens: IntArray, found: int, entry: int) -> bool:
        """Whether one of the rows shares enough of these tokens, beyond those found below `entry`."""
        row = self._row_of.get((entry, tokens[found : found + self._size].tobytes()))
        if row is None:
            return False
        end = min(len(tokens), int(self._rows.num_tokens[row]))
        differ = np.flatnonzero(tokens[found:end] != self._rows.tokens[row, found:end])
        num_common = int(differ[0]) if len(differ) else end - found
        return num_common >= WORTH_A_STEP * self._size
