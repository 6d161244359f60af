"""One thing wrong with the blocks of layers that have a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from fault import WINDOWED, Table

from gapless.attention.base import Attend, AttentionBatch
from gapless.attention.reference import ReferenceAttention
from gapless.core.block_tables import BlockTables
from gapless.core.plan import Plan
from gapless.core.prefix_index import Entry, PrefixIndex
from gapless.core.scheduler import Scheduler

FAULTS = fault = Table(WINDOWED)


@fault("blocks of a window are given back one too early", BlockTables, "give_back")
def _(original):
    def give_back(self: BlockTables, rows) -> None:
        self._rows.cursor += self._size
        self._rows.num_tokens += self._size
        try:
            original(self, rows)
        finally:
            self._rows.cursor -= self._size
            self._rows.num_tokens -= self._size

    return give_back


@fault("a chunk's blocks are given back with the plan that reads them", Scheduler, "_promise")
def _(original):
    def promise(self: Scheduler, *args) -> Plan:
        plan = original(self, *args)
        self.tables.give_back(self._fed)
        return plan

    return promise


@fault("blocks that were given back are released again with the row", BlockTables, "blocks_of")
def _(original):
    def blocks_of(self: BlockTables, row: int) -> list[int]:
        return self._rows.blocks[row, : self._rows.num_blocks[row]].ravel().tolist()

    return blocks_of


@fault("a new owner begins with the windows of the last one", BlockTables, "share")
def _(original):
    def share(self: BlockTables, row: int, entries: Sequence[Entry]) -> None:
        before = self._rows.first_blocks[row].copy()
        original(self, row, entries)
        self._rows.first_blocks[row] = np.maximum(before, self._rows.first_blocks[row])

    return share


@fault("a prefix is found without the blocks of its window", PrefixIndex, "_num_usable")
def _(original):
    return lambda self, entries: len(entries)


@fault("layers read the table of the other group", ReferenceAttention, "begin")
def _(original):
    def begin(self: ReferenceAttention, batch: AttentionBatch) -> Attend:
        return original(self, replace(batch, tables=batch.tables[::-1]))

    return begin


@fault("all groups store their keys in the first one's blocks", ReferenceAttention, "begin")
def _(original):
    def begin(self: ReferenceAttention, batch: AttentionBatch) -> Attend:
        return original(self, replace(batch, slots=batch.slots[:1] * len(batch.slots)))

    return begin
