"""The writers of every place of the KV cache, followed in the order of launches: the order of the one compute stream.

Mirrors what the device will do with each plan: rows get owners and blocks, a step writes its tokens' places and reads
its rows from their beginning. A place that holds anything but what its reader or an equal prefix wrote is a conflict,
named with both requests, the block and the steps. Sees plans, not memory. For the checking mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gapless.core.limits import Limits
from gapless.core.plan import Plan
from gapless.core.request import LongArray, Request, RowTable
from gapless.errors import RaceError

NOBODY = -1


@dataclass(eq=False, slots=True)
class Tenancy:
    """A request in a row, from one seat to the next."""

    number: int
    request: Request
    epoch: int
    blocks: LongArray  # [num_blocks] the row's table as the device has it
    writers: LongArray  # [num_blocks, block_size] the tenancies whose writes this one may read
    length: int = 0  # positions written, or found in the prefix cache


@dataclass(frozen=True, slots=True)
class WrittenSpan:
    """The positions that a step writes for one tenancy."""

    tenancy: Tenancy
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Touched:
    """The blocks that a step touches: those whose content is over, those to be filled, the last of each sampled row."""

    freed: LongArray
    fresh: LongArray
    sample_blocks: LongArray  # [num_samples]


class BlockLedger:
    """The content of all blocks, and of the device's block tables, at the end of the launched steps."""

    def __init__(self, limits: Limits) -> None:
        shape = (limits.num_blocks, limits.block_size)
        self._size = limits.block_size
        self._writer = np.full(shape, NOBODY, np.int64)
        self._position = np.full(shape, NOBODY, np.int64)
        self._step = np.zeros(shape, np.int64)
        self._poisoned = np.ones(limits.num_blocks, np.bool_)  # new memory needs none
        self._tenants: list[Tenancy | None] = [None] * limits.num_rows
        self._tenancies: list[Tenancy] = []
        self.num_reads = 0  # places whose writer was checked

    def observe(self, plan: Plan, rows: RowTable, free: Sequence[int]) -> Touched:
        """Follow a plan that is about to be launched. Raises RaceError."""
        adopting = [self._seat(row, rows) for row in plan.seat_rows.tolist()]
        fresh = self._take_blocks(plan, rows, adopting)
        spans = list(self._spans(plan, rows))
        freed = np.array([block for block in free if not self._poisoned[block]], np.int64)
        for span in spans:
            self._check_table(plan, span, rows, free)
            self._write(plan, span)
        for span in spans:
            self._read(plan, span)
        self._poisoned[freed] = True
        self._poisoned[fresh] = False
        return Touched(freed, fresh, self._sample_blocks(plan))

    def _seat(self, row: int, rows: RowTable) -> Tenancy:
        request = rows.request[row]
        assert request is not None, f"row {row} is given to nobody"
        count = -(-request.limit // self._size)
        table = np.full(count, NOBODY, np.int64)
        writers = np.full((count, self._size), len(self._tenancies), np.int64)
        tenancy = Tenancy(len(self._tenancies), request, int(rows.epoch[row]), table, writers)
        if (before := self._tenants[row]) is not None:
            before.writers = before.blocks = np.empty(0, np.int64)  # its number is all that blocks remember
        self._tenancies.append(tenancy)
        self._tenants[row] = tenancy
        return tenancy

    def _take_blocks(self, plan: Plan, rows: RowTable, adopting: list[Tenancy]) -> LongArray:
        """Enter the new blocks into the tables; return those that are not shared."""
        starts = {chunk.row: chunk.start for chunk in plan.chunks}
        fresh = []
        for row, index, block in plan.new_blocks.tolist():
            tenancy = self._tenant(row, rows, plan)
            tenancy.blocks[index] = block
            if tenancy in adopting and (index + 1) * self._size <= starts.get(row, 0):
                self._adopt(plan, tenancy, index, rows)
            else:
                fresh.append(block)
        for row in plan.seat_rows.tolist():
            self._tenant(row, rows, plan).length = starts.get(row, 0)
        return np.array(fresh, np.int64)

    def _adopt(self, plan: Plan, tenancy: Tenancy, index: int, rows: RowTable) -> None:
        """A block found in the prefix cache: whoever wrote it must have the same tokens, and all before them too."""
        block, first, end = int(tenancy.blocks[index]), index * self._size, (index + 1) * self._size
        wrong = self._position[block] != np.arange(first, end)
        if wrong.any():
            raise self._conflict(plan, tenancy, first + int(np.argmax(wrong)))
        for number in np.unique(self._writer[block]).tolist():
            theirs = _tokens(self._tenancies[number].request, rows)[:end]
            if len(theirs) < end or (theirs != _tokens(tenancy.request, rows)[:end]).any():
                raise self._conflict(plan, tenancy, first)
        tenancy.writers[index] = self._writer[block]

    def _tenant(self, row: int, rows: RowTable, plan: Plan) -> Tenancy:
        tenancy, request = self._tenants[row], rows.request[row]
        if tenancy is None or tenancy.request is not request or tenancy.epoch != rows.epoch[row]:
            owner = "nobody" if tenancy is None else f"request {tenancy.request.id!r}"
            name = "nobody" if request is None else f"request {request.id!r}"
            raise RaceError(f"step {plan.step} runs row {row} for {name}; on the device it belongs to {owner}")
        return tenancy

    def _spans(self, plan: Plan, rows: RowTable) -> Iterator[WrittenSpan]:
        for row in plan.decode_rows.tolist():
            tenancy = self._tenant(row, rows, plan)
            yield WrittenSpan(tenancy, tenancy.length, tenancy.length + 1)
        for chunk in plan.chunks:
            yield WrittenSpan(self._tenant(chunk.row, rows, plan), chunk.start, chunk.length)

    def _check_table(self, plan: Plan, span: WrittenSpan, rows: RowTable, free: Sequence[int]) -> None:
        """Raise RaceError unless the device will do what the scheduler believes, on blocks that have an owner."""
        tenancy, row = span.tenancy, span.tenancy.request.row
        name = f"step {plan.step}, request {tenancy.request.id!r} in row {row}"
        if span.start != tenancy.length or span.end != rows.cursor[row]:
            raise RaceError(
                f"{name}: the device writes positions {span.start} to {span.end - 1} after {tenancy.length} others, "
                f"the scheduler has handed out {rows.cursor[row]}"
            )
        count = -(-span.end // self._size)
        differs = tenancy.blocks[:count] != rows.blocks[row, :count]
        if differs.any():
            index = int(np.argmax(differs))
            raise RaceError(
                f"{name}: entry {index} of the block table is {tenancy.blocks[index]} on the device "
                f"and {rows.blocks[row, index]} for the scheduler"
            )
        gone = np.isin(tenancy.blocks[:count], free)
        if gone.any():
            raise RaceError(f"{name}: block {tenancy.blocks[int(np.argmax(gone))]} is free, and the step reads it")

    def _write(self, plan: Plan, span: WrittenSpan) -> None:
        positions = np.arange(span.start, span.end)
        places = span.tenancy.blocks[positions // self._size], positions % self._size
        self._writer[places] = span.tenancy.number
        self._position[places] = positions
        self._step[places] = plan.step
        span.tenancy.length = span.end

    def _read(self, plan: Plan, span: WrittenSpan) -> None:
        """Every place below the row's length holds its own position, written by this tenancy or an adopted one."""
        tenancy, length = span.tenancy, span.end
        blocks = tenancy.blocks[: -(-length // self._size)]
        theirs = (self._writer[blocks] != tenancy.writers[: len(blocks)]).reshape(-1)[:length]
        right = ~theirs & (self._position[blocks].reshape(-1)[:length] == np.arange(length))
        self.num_reads += length
        if not right.all():
            raise self._conflict(plan, tenancy, int(np.argmin(right)))

    def _sample_blocks(self, plan: Plan) -> LongArray:
        tenancies = [self._tenants[row] for row in plan.sample_rows.tolist()]
        last = [tenancy.blocks[(tenancy.length - 1) // self._size] for tenancy in tenancies if tenancy is not None]
        return np.array(last, np.int64)

    def _conflict(self, plan: Plan, tenancy: Tenancy, position: int) -> RaceError:
        block, offset = int(tenancy.blocks[position // self._size]), position % self._size
        number = int(self._writer[block, offset])
        found = "nobody has written"
        if number != NOBODY:
            writer = self._tenancies[number].request.id
            found = f"step {self._step[block, offset]} wrote position {self._position[block, offset]} of {writer!r}"
        return RaceError(
            f"step {plan.step} reads position {position} of request {tenancy.request.id!r} from block {block}, "
            f"where {found}"
        )


def _tokens(request: Request, rows: RowTable) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """All known tokens of a request, in its row or out of it."""
    if request.row < 0:
        return request.tokens
    return rows.tokens[request.row, : rows.num_tokens[request.row]]
