"""The writers of every place of the KV cache, followed in the order of launches: the order of the one compute stream.

Mirrors what the device will do with each plan: rows get owners and blocks, a step writes its tokens' places and reads
its rows from their beginning, or from where the window of a group of layers begins. A place that holds anything but
what its reader or an equal prefix wrote for the same group is a conflict, named with both requests, the block and the
steps. Sees plans, not memory. For the checking mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gapless.core.limits import Limits
from gapless.core.plan import Plan
from gapless.core.request import LongArray, Request, RowTable
from gapless.core.windows import first_block
from gapless.errors import RaceError

NOBODY = -1


@dataclass(eq=False, slots=True)
class Tenancy:
    """A request in a row, from one seat to the next."""

    number: int
    request: Request
    epoch: int
    blocks: LongArray  # [num_groups, num_blocks] the row's tables as the device has them
    writers: LongArray  # [num_groups, num_blocks, block_size] the writers whose writes this one may read
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
    sample_blocks: LongArray  # [num_groups, num_samples]


class BlockLedger:
    """The content of all blocks, and of the device's block tables, at the end of the launched steps."""

    def __init__(self, limits: Limits) -> None:
        shape = (limits.num_blocks + 1, limits.block_size)  # the last has no owner, as on the device
        self._size = limits.block_size
        self._windows = limits.windows
        self._unowned = limits.num_blocks
        self._writer = np.full(shape, NOBODY, np.int64)  # number of the tenancy times groups, and the group
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
        count, groups = -(-request.limit // self._size), len(self._windows)
        table = np.full((groups, count), NOBODY, np.int64)
        writers = np.empty((groups, count, self._size), np.int64)
        writers[:] = (len(self._tenancies) * groups + np.arange(groups))[:, None, None]
        tenancy = Tenancy(len(self._tenancies), request, int(rows.epoch[row]), table, writers)
        if (before := self._tenants[row]) is not None:
            before.writers = before.blocks = np.empty((0, 0), np.int64)  # its number is all that blocks remember
        self._tenancies.append(tenancy)
        self._tenants[row] = tenancy
        return tenancy

    def _take_blocks(self, plan: Plan, rows: RowTable, adopting: list[Tenancy]) -> LongArray:
        """Enter the new blocks into the tables; return those that are not shared."""
        starts = {chunk.row: chunk.start for chunk in plan.chunks}
        fresh = []
        for row, index, *blocks in plan.new_blocks.tolist():
            tenancy = self._tenant(row, rows, plan)
            tenancy.blocks[:, index] = blocks
            if tenancy in adopting and (index + 1) * self._size <= starts.get(row, 0):
                for group in self._readers(index, starts[row]):
                    self._adopt(plan, tenancy, group, index, rows)
            else:
                fresh += blocks
        for row in plan.seat_rows.tolist():
            self._tenant(row, rows, plan).length = starts.get(row, 0)
        return np.array(fresh, np.int64)

    def _readers(self, index: int, start: int) -> list[int]:
        """Groups whose layers read this entry of their tables when a row goes on at `start`."""
        firsts = [0 if window is None else first_block(start, window, self._size) for window in self._windows]
        return [group for group, first in enumerate(firsts) if first <= index]

    def _adopt(self, plan: Plan, tenancy: Tenancy, group: int, index: int, rows: RowTable) -> None:
        """A block found in the prefix cache: whoever wrote it must have the same tokens, and all before them too."""
        block, first, end = int(tenancy.blocks[group, index]), index * self._size, (index + 1) * self._size
        wrong = (self._position[block] != np.arange(first, end)) | (self._writer[block] % len(self._windows) != group)
        if wrong.any():
            raise self._conflict(plan, tenancy, group, first + int(np.argmax(wrong)))
        for number in np.unique(self._writer[block] // len(self._windows)).tolist():
            theirs = _tokens(self._tenancies[number].request, rows)[:end]
            if len(theirs) < end or (theirs != _tokens(tenancy.request, rows)[:end]).any():
                raise self._conflict(plan, tenancy, group, first)
        tenancy.writers[group, index] = self._writer[block]

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
        for group in range(len(self._windows)):
            read = self._read_entries(span, group)
            differs = tenancy.blocks[group, read] != rows.blocks[row, read, group]
            if differs.any():
                index = read.start + int(np.argmax(differs))
                raise RaceError(
                    f"{name}: entry {index} of the block table{self._of_group(group)} is "
                    f"{tenancy.blocks[group, index]} on the device and {rows.blocks[row, index, group]} "
                    "for the scheduler"
                )
            gone = np.isin(tenancy.blocks[group, read], [*free, self._unowned])
            if gone.any():
                block = tenancy.blocks[group, read][int(np.argmax(gone))]
                raise RaceError(f"{name}: block {block} is free, and the step reads it")

    def _read_entries(self, span: WrittenSpan, group: int) -> slice:
        """The entries of a table that the span's tokens see."""
        window = self._windows[group]
        first = 0 if window is None else first_block(span.start, window, self._size)
        return slice(first, -(-span.end // self._size))

    def _of_group(self, group: int) -> str:
        return f" of group {group}" if len(self._windows) > 1 else ""

    def _write(self, plan: Plan, span: WrittenSpan) -> None:
        positions = np.arange(span.start, span.end)
        for group, table in enumerate(span.tenancy.blocks):
            places = table[positions // self._size], positions % self._size
            self._writer[places] = span.tenancy.number * len(self._windows) + group
            self._position[places] = positions
            self._step[places] = plan.step
        span.tenancy.length = span.end

    def _read(self, plan: Plan, span: WrittenSpan) -> None:
        """Every place that is seen holds its own position, written by this tenancy or an adopted one."""
        tenancy = span.tenancy
        for group, window in enumerate(self._windows):
            read = self._read_entries(span, group)
            first = 0 if window is None else max(0, span.start - window + 1)
            seen = slice(first - read.start * self._size, span.end - read.start * self._size)
            blocks = tenancy.blocks[group, read]
            theirs = (self._writer[blocks] != tenancy.writers[group, read]).reshape(-1)[seen]
            right = ~theirs & (self._position[blocks].reshape(-1)[seen] == np.arange(first, span.end))
            self.num_reads += len(right)
            if not right.all():
                raise self._conflict(plan, tenancy, group, first + int(np.argmin(right)))

    def _sample_blocks(self, plan: Plan) -> LongArray:
        tenancies = [self._tenants[row] for row in plan.sample_rows.tolist()]
        last = [tenancy.blocks[:, (tenancy.length - 1) // self._size] for tenancy in tenancies if tenancy is not None]
        return np.array(last, np.int64).reshape(-1, len(self._windows)).T

    def _conflict(self, plan: Plan, tenancy: Tenancy, group: int, position: int) -> RaceError:
        block, offset = int(tenancy.blocks[group, position // self._size]), position % self._size
        number, other = divmod(int(self._writer[block, offset]), len(self._windows))
        found = "nobody has written"
        if number != NOBODY:
            writer = self._tenancies[number].request.id
            what = f"position {self._position[block, offset]}{self._of_group(other)} of {writer!r}"
            found = f"step {self._step[block, offset]} wrote {what}"
        return RaceError(
            f"step {plan.step} reads position {position}{self._of_group(group)} of request {tenancy.request.id!r} "
            f"from block {block}, where {found}"
        )


def _tokens(request: Request, rows: RowTable) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """All known tokens of a request, in its row or out of it."""
    if request.row < 0:
        return request.tokens
    return rows.tokens[request.row, : rows.num_tokens[request.row]]
