"""One thing wrong in the scheduler, the rows, the pool, the index, the packing or the sampler."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from fault import Fault, Table

import gapless.runner.fill
import gapless.runner.runner
import gapless.runner.sampler
from gapless.core.block_pool import BlockPool
from gapless.core.block_tables import BlockTables
from gapless.core.plan import Plan
from gapless.core.prefix_index import ROOT, PrefixIndex
from gapless.core.prefix_sharing import PrefixSharing
from gapless.core.request import IntArray, Request, RowTable
from gapless.core.row_fields import need
from gapless.core.scheduler import Scheduler
from gapless.pipeline.executor import LocalExecutor, Ticket
from gapless.runner.fill import Packed
from gapless.runner.row_store import RowStore, seat_columns
from gapless.runner.runner import Runner

FAULTS = fault = Table()


@fault("a row is freed when its last token is promised", Scheduler, "schedule")
def _(original):
    def schedule(self: Scheduler) -> Plan | None:
        plan = original(self)
        for row in _exhausted(self, plan):
            self.rows._free.append(row)
        return plan

    return schedule


@fault("blocks are freed when the last token is promised", Scheduler, "schedule")
def _(original):
    def schedule(self: Scheduler) -> Plan | None:
        plan = original(self)
        for row in _exhausted(self, plan):
            self.pool.release(self.tables.blocks_of(row))
            self.rows.num_blocks[row] = 0
        return plan

    return schedule


def _exhausted(scheduler: Scheduler, plan: Plan | None) -> list[int]:
    rows = scheduler.rows
    sampled = plan.sample_rows if plan is not None else np.empty(0, np.int32)
    return sampled[rows.num_tokens[sampled] + rows.pending[sampled] >= rows.limit[sampled]].tolist()


@fault("a block in use is handed out again", BlockPool, "allocate")
def _(original):
    def allocate(self: BlockPool) -> int | None:
        block = original(self)
        if block is not None and block % 3 == 1:
            self._free.insert(0, block)
        return block

    return allocate


@fault("a shared block takes no reference", BlockPool, "share")
def _(original):
    def share(self: BlockPool, blocks) -> None:
        original(self, [block for block in blocks if self._references[block] == 0])

    return share


@fault("the first of several holders frees a block", BlockPool, "release")
def _(original):
    def release(self: BlockPool, blocks) -> None:
        for block in blocks:
            self._references[block] = min(self._references[block], 1)
        original(self, [block for block in blocks if self._references[block]])

    return release


@fault("a block that gets another content stays in the index", PrefixIndex, "forget")
def _(original):
    return lambda self, block: self._key_of.pop(block)


@fault("the prefix cache outlives a failed step", BlockPool, "clear_cache")
def _(original):
    return lambda self: None


@fault("a failed step restarts nobody", Scheduler, "_step_back")
def _(original):
    def step_back(self: Scheduler, request: Request) -> None:
        if sys._getframe(1).f_code.co_name != "fail":
            original(self, request)

    return step_back


@fault("a prefix is found without a look at its tokens", PrefixIndex, "match")
def _(original):
    def match(self: PrefixIndex, tokens: IntArray, num_tokens: int):
        blocks, entry = [], ROOT
        for _ in range(0, num_tokens - self.block_size + 1, self.block_size):
            found = next((value for (parent, _), value in self._entries.items() if parent == entry), None)
            if found is None:
                break
            entry, block = found
            blocks.append(block)
        return blocks, entry

    return match


@fault("a prefix is found by its last block alone", PrefixIndex, "insert")
def _(original):
    def insert(self: PrefixIndex, parent: int, tokens: IntArray, blocks) -> int:
        parts = zip(tokens.reshape(-1, self.block_size), blocks, strict=True)
        return [original(self, ROOT, part, [block]) for part, block in parts][-1]

    return insert


@fault("a prefix match leaves no token to compute", PrefixSharing, "match")
def _(original):
    def match(self: PrefixSharing, request: Request):
        if not self.enabled:
            return original(self, request)
        return self._pool.index.match(request.tokens, len(request.tokens))

    return match


@fault("blocks are registered before their tokens are known", PrefixSharing, "register")
def _(original):
    def register(self: PrefixSharing, row: int) -> None:
        known = self._rows.num_tokens[row]
        self._rows.num_tokens[row] = max(known, self._rows.cursor[row])
        original(self, row)
        self._rows.num_tokens[row] = known

    return register


@fault("an entry of the block table never reaches the plan", BlockTables, "take_new")
def _(original):
    def take(self: BlockTables, lost) -> IntArray:
        found = original(self, lost)
        self.num_plans = getattr(self, "num_plans", 0) + 1
        return found[:-1] if len(found) > 1 else found[:0] if self.num_plans % 4 == 3 else found

    return take


@fault("an entry of the block table is lost on the device", RowStore, "apply")
def _(original):
    def apply(self: RowStore, packed) -> None:
        original(self, replace(packed, new_blocks=packed.new_blocks[:-1]) if len(packed.new_blocks) > 1 else packed)

    return apply


@fault("two rows' new blocks are exchanged on the device", RowStore, "apply")
def _(original):
    def apply(self: RowStore, packed) -> None:
        blocks = packed.new_blocks.clone()
        if len(blocks):
            blocks[:, 2] = blocks[:, 2].flip(0)
        original(self, replace(packed, new_blocks=blocks))

    return apply


@fault("a preempted row stays in the plan", Scheduler, "_promise")
def _(original):
    def promise(self: Scheduler, decodes, widths, chunks, seats) -> Plan:
        gone = [row for row in sorted(self._preempted) if row not in decodes and not self.rows.decoding[row]]
        return original(self, np.sort(np.concatenate((decodes, np.array(gone, np.int64)))), widths, chunks, seats)

    return promise


@fault("a preempted request keeps its pending count", RowTable, "seat")
def _(original):
    def seat(self: RowTable, request: Request) -> int:
        pending = self.pending.copy()
        row = original(self, request)
        self.pending[row] = pending[row]
        return row

    return seat


@fault("a new owner begins at the old one's cursor", Scheduler, "_seat")
def _(original):
    def seat(self: Scheduler, request: Request, blocks, entry) -> int:
        before = self.rows.cursor.copy()
        row = original(self, request, blocks, entry)
        self.rows.cursor[row] = min(max(before[row], self.rows.cursor[row]), self.rows.num_tokens[row] - 1)
        return row

    return seat


@fault("a row keeps its epoch when its owner leaves", RowTable, "unseat")
def _(original):
    def unseat(self: RowTable, request: Request) -> None:
        row = request.row
        original(self, request)
        self.epoch[row] -= 2  # and the next owner's seat gives the epoch of the one that left

    return unseat


@fault("late results are committed to whoever has the row", Scheduler, "commit")
def _(original):
    def commit(self: Scheduler, plan: Plan, results: IntArray):
        epochs = self.rows.epoch[plan.sample_rows]
        here = np.array([self.rows.request[row] is not None for row in plan.sample_rows.tolist()], bool)
        return original(self, replace(plan, sample_epochs=np.where(here, epochs, plan.sample_epochs)), results)

    return commit


@fault("promises do not count towards the limit", Scheduler, "_plan_decodes")
def _(original):
    def plan_decodes(self: Scheduler):
        pending = self.rows.pending.copy()
        self.rows.pending[:] = np.minimum(pending, 0)
        found = original(self)
        self.rows.pending[:] = np.where(self.rows.decoding, pending, self.rows.pending)
        return found

    return plan_decodes


@fault("an abort keeps the blocks", Scheduler, "abort")
def _(original):
    def abort(self: Scheduler, request_id: str, reason: str = "abort"):
        with patch.object(BlockPool, "release", lambda self, blocks: None):
            return original(self, request_id, reason)

    return abort


@fault("a sampled token is carried over from the wrong row", RowStore, "advance")
def _(original):
    def advance(self: RowStore, packed, tokens: torch.Tensor, needs: int) -> None:
        original(self, packed, tokens.roll(1), needs)

    return advance


@fault("a placeholder stays in the row after prefill", RowStore, "advance")
def _(original):
    def advance(self: RowStore, packed, tokens: torch.Tensor, needs: int) -> None:
        original(self, packed, tokens, needs)
        self.last_token[packed.chunk_rows.long()] = 0

    return advance


@fault("a row's last token is written one step late", RowStore, "advance")
def _(original):
    def advance(self: RowStore, packed, tokens: torch.Tensor, needs: int) -> None:
        late = getattr(self, "late", None)
        original(self, packed, self.last_token[packed.sample_rows.long()], needs)
        if late is not None:
            self.last_token[late[0]] = late[1]
        self.late = (packed.sample_rows.long().clone(), tokens.clone())

    return advance


@fault("lengths of decode rows are not advanced", RowStore, "advance")
def _(original):
    def advance(self: RowStore, packed, tokens: torch.Tensor, needs: int) -> None:
        original(self, packed, tokens, needs)
        self.length[packed.decode_rows.long()] -= 1

    return advance


@fault("the length after a chunk is one short", RowStore, "advance")
def _(original):
    def advance(self: RowStore, packed, tokens: torch.Tensor, needs: int) -> None:
        original(self, replace(packed, chunk_ends=packed.chunk_ends - 1), tokens, needs)

    return advance


@fault("padding points at a row that somebody has", RowStore, "advance")
def _(original):
    def advance(self: RowStore, packed, tokens: torch.Tensor, needs: int) -> None:
        original(self, packed, tokens, needs)
        stale = getattr(self, "previous", packed.decode_rows[:0])
        gone = stale[~torch.isin(stale, packed.decode_rows)].long()
        self.length[gone] += 1  # what a padded step does to its padding
        self.previous = packed.decode_rows.clone()

    return advance


@fault("a new owner's sampling state does not reach the device", RowStore, "apply")
def _(original):
    return lambda self, packed: original(self, replace(packed, seat_rows=packed.seat_rows[:0]))


@fault("seeds belong to rows and not to requests", RowStore, "apply")
def _(original):
    def apply(self: RowStore, packed: Packed) -> None:
        original(self, packed)
        rows = packed.seat_rows.long()
        seat_columns(self.seats)["seed"][rows] = rows

    return apply


@fault("random numbers are those of the position before", gapless.runner.sampler, "uniform")
def _(original):
    return lambda seed, place: original(seed, place - 1)


@fault("random numbers come from the order in the batch", gapless.runner.sampler, "uniform")
def _(original):
    return lambda seed, place: original(torch.arange(len(seed)), place)


@fault("the minimum length is known one token late", RowStore, "apply")
def _(original):
    def apply(self: RowStore, packed: Packed) -> None:
        original(self, packed)
        seat_columns(self.seats)["min_total"][packed.seat_rows.long()] -= 1

    return apply


@fault("the sampler is told of minimum lengths one step late", Scheduler, "_promise")
def _(original):
    def promise(self: Scheduler, decodes, widths, chunks, seats) -> Plan:
        plan = original(self, decodes, widths, chunks, seats)
        late, self.late = getattr(self, "late", 0), plan.needs & need("min_total")
        return replace(plan, needs=plan.needs & ~need("min_total") | late)

    return promise


@fault("a sample follows the token before the last", gapless.runner.fill, "_sample_tokens")
def _(original):
    return lambda plan: np.maximum(original(plan) - (1 if plan.chunks else 0), 0).astype(np.int32)


@fault("positions of a later chunk begin at 0", gapless.runner.fill, "_chunk_parts")
def _(original):
    def parts(plan: Plan) -> list[IntArray]:
        found = original(plan)
        found[1] = np.concatenate([np.arange(len(chunk.tokens), dtype=np.int32) for chunk in plan.chunks])
        return found

    return parts


@fault("a row's length misses the step's own token", Runner, "_batch")
def _(original):
    def batch(self: Runner, *args: Any):
        found = original(self, *args)
        return replace(found, decode_lengths=found.decode_lengths - 1)

    return batch


class ErrorLost(LocalExecutor):
    """A step that failed gives whatever lies in the buffer."""

    def collect(self, ticket: Ticket) -> IntArray:
        try:
            ticket.slot.d2h_over.synchronize()
        except RuntimeError:
            count = ticket.plan.num_samples
            tokens = ticket.slot.host_out.array[:count].copy()
            self._free.append(ticket.slot)
            return tokens
        return super().collect(ticket)


FAULTS.append(Fault("the error of a failed step is lost", make=lambda: ErrorLost))
