"""Decides what runs next, on promises, and turns results into facts.

The only writer of requests and rows: `schedule` promises (cursor, pending), `commit` settles. Older requests come
first: they are admitted first and grow first. When blocks run out, the latest arrival is preempted, and computed again
from its known tokens. So the oldest always advances, and no request waits for ever. Knows no tensors, no device and no
text.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gapless.core.baggage import NO_BAGGAGE
from gapless.core.block_pool import BlockPool
from gapless.core.block_tables import BlockTables
from gapless.core.facts import Facts
from gapless.core.holds import Holds
from gapless.core.limits import Limits, check_fits
from gapless.core.outcome import Commit, Counters, Finished
from gapless.core.pace import Pace
from gapless.core.plan import NO_SEATS, NOTHING, Chunk, Plan
from gapless.core.prefix_index import Entry, PrefixIndex
from gapless.core.prefix_sharing import PrefixSharing
from gapless.core.request import IntArray, LongArray, Request, RowTable, int_array
from gapless.core.scoring import Scoring
from gapless.errors import InvalidRequest


class Scheduler:
    """Requests in, plans out; results in, facts out."""

    def __init__(
        self,
        limits: Limits,
        announce: Callable[[Request], None] = lambda request: None,
        pace: Pace | None = None,
        chunk_cost: float = 0.0,
    ) -> None:
        """announce: called with each request that is about to get a row, before any other work for it.

        chunk_cost: by how much of its time a chunk of a few tokens delays a decode step.
        """
        self._chunk_cost = chunk_cost
        self.limits = limits
        self.pace = pace or Pace(math.inf, limits.max_batch_tokens)
        self._announce = announce
        self.rows = RowTable(limits.num_rows, limits.max_model_len, limits.block_size, limits.windows)
        self.pool = BlockPool(limits.num_blocks, PrefixIndex(limits.block_size, limits.windows))
        self.tables = BlockTables(self.rows, self.pool, limits)
        self.sharing = PrefixSharing(self.rows, self.pool, limits.block_size, enabled=limits.prefix_cache)
        self.scoring = Scoring(self.rows)
        self.holds = Holds(self.rows)
        self.counters = Counters()
        self.facts = Facts(self.rows, self.sharing, self.scoring, self.counters, self._finish)
        self._waiting: OrderedDict[str, Request] = OrderedDict()  # by arrival
        self._prefilling: list[int] = []  # rows, by arrival
        self._fed: list[int] = []  # rows that had chunks in the last plan
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._preempted: set[int] = set()  # rows lost while the plan was made
        self._last_purged_step = 0  # the last one planned when a failure discarded all KV

    # -- who is here ---------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._requests) - len(self._waiting)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def can_run(self) -> bool:
        """Whether some request is not held."""
        return len(self._requests) > len(self.holds)

    def add(self, request: Request) -> None:
        """Queue a request. One that could never run is refused here, with the numbers."""
        check_fits(request, self.limits)
        if request.id in self._requests or request.was_admitted:
            raise InvalidRequest(f"request {request.id!r} was submitted before; make a new one")
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._requests[request.id] = request
        self._waiting[request.id] = request

    def hold(self, request_id: str, reason: str) -> None:
        """Keep a request out of plans until it is released. Unknown ids are ignored."""
        if (request := self._requests.get(request_id)) is not None:
            self.holds.hold(request, reason)

    def release(self, request_id: str) -> None:
        """Let a request that is held run again."""
        if (request := self._requests.get(request_id)) is not None:
            self.holds.release(request)

    def abort(self, request_id: str, reason: str = "abort", error: BaseException | None = None) -> Finished | None:
        """End a request now, even with steps in flight. None if it is unknown or has ended."""
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, reason, error)

    def abort_all(self) -> tuple[Finished, ...]:
        """End every request."""
        return tuple(self._finish(request, "abort") for request in list(self._requests.values()))

    # -- promises ------------------------------------------------------------------------------------------------

    def schedule(self) -> Plan | None:
        """Plan the next step, or None when nothing can run before something in flight comes back."""
        self.tables.begin_plan()
        if self._fed and self.tables.has_windows:
            self.tables.give_back([row for row in self._fed if self.rows.request[row] is not None])
        self._preempted.clear()
        decodes = self._plan_decodes()
        widths = self._plan_widths(decodes) if self.rows.num_wide else NOTHING
        budget = self._budget(decodes) - (int(widths.sum()) - len(decodes) if len(widths) else 0)
        chunks: list[Chunk] = []
        for row in sorted(self._prefilling, key=self._feeds_prompt):
            if row not in self._preempted and self.rows.ceiling[row] > 0:
                budget -= self._plan_chunk(row, budget, chunks)
        seats = self._admit(budget, chunks) if self._waiting and not self._preempted else []
        if self._preempted:  # later arrivals gave way after they were planned
            kept = self.rows.decoding[decodes]
            decodes, widths = decodes[kept], widths[kept] if len(widths) else NOTHING
            chunks = [chunk for chunk in chunks if chunk.row not in self._preempted]
        if self.holds:
            self.holds.count_plan()
        if len(decodes) == 0 and not chunks:
            return None
        return self._promise(decodes, widths, chunks, seats)

    def _budget(self, decodes: LongArray) -> int:
        """Most prompt tokens of the step: as many as fit, or fewer where a long step would delay a stream."""
        fits, streams = self.limits.max_batch_tokens - len(decodes), self.rows.streams
        if self._prefilling or self._waiting:
            forced = [row for row in self._prefilling if not self._feeds_prompt(row)]
            if streams[decodes].any() or streams[forced].any():
                return min(fits, self.pace.chunk_tokens(len(decodes)))
        return fits

    def _feeds_prompt(self, row: int) -> bool:
        """Whether some of the row's prompt is left to feed, and not only tokens that were forced."""
        request = self.rows.request[row]
        assert request is not None
        return bool(self.rows.cursor[row] < request.num_prompt)

    def _plan_decodes(self) -> LongArray:
        rows = self.rows
        ready = np.flatnonzero(rows.decoding & (rows.num_tokens + rows.pending < rows.ceiling))
        cramped = rows.cursor[ready] >= rows.num_blocks[ready] * self.limits.block_size
        if not cramped.any():
            return ready
        short = ready[cramped]
        if self.tables.has_windows:
            self.tables.give_back(short.tolist())
        if self.tables.can_grow(len(short)):
            self.tables.grow_each(short)
            return ready
        stalled = []
        for row in short[np.argsort(rows.arrival[short])].tolist():
            if row not in self._preempted and self._grow(row, int(rows.cursor[row]) + 1) == 0:
                stalled.append(row)
        return ready[~np.isin(ready, stalled)] if stalled else ready

    def _plan_widths(self, decodes: LongArray) -> IntArray:
        """How many samples each decode row is promised: its width, where length, blocks and the step have room."""
        rows, room = self.rows, self.limits.max_batch_tokens - len(decodes)
        widths = np.ones(len(decodes), np.int32)
        for index in np.flatnonzero(rows.width[decodes] > 1).tolist():
            row = int(decodes[index])
            left = int(rows.ceiling[row] - rows.num_tokens[row] - rows.pending[row])
            wanted = min(int(rows.width[row]), left, room + 1)
            if rows.decoding[row] and wanted > 1:  # it may have given way; nobody gives way for a draft
                widths[index] = self.tables.grow(row, int(rows.cursor[row]) + wanted, lambda: False)
                room -= int(widths[index]) - 1
        return widths if (widths > 1).any() else NOTHING

    def _plan_chunk(self, row: int, budget: int, chunks: list[Chunk]) -> int:
        start = int(self.rows.cursor[row])
        known = int(self.rows.num_tokens[row])
        count = self._grow(row, min(known, start + budget)) if budget > 0 else 0
        if count > 0:
            tokens = int_array(self.rows.tokens[row, start : start + count].copy())
            targets, scored_from = self.scoring.targets(row, start, start + count)
            samples = start + count == known
            chunks.append(Chunk(row, int(self.rows.epoch[row]), start, tokens, samples, targets, scored_from))
        return count

    def _grow(self, row: int, length: int) -> int:
        """Give the row blocks for `length` tokens, at later arrivals' cost; return how many fit past its cursor."""
        return self.tables.grow(row, length, lambda: self._preempt_after(int(self.rows.arrival[row])))

    def _preempt_after(self, arrival: int) -> bool:
        """Preempt the latest arrival, if it came after this one."""
        row = int(np.argmax(self.rows.arrival))
        if self.rows.arrival[row] <= arrival:
            return False
        request = self.rows.request[row]
        assert request is not None
        self.counters.num_preemptions += 1
        self.counters.num_recomputed += int(self.rows.cursor[row])
        request.num_preemptions += 1
        self._preempted.add(row)
        self._step_back(request)
        return True

    def _admit(self, budget: int, chunks: list[Chunk]) -> list[int]:
        """Give rows to waiting requests, and return the rows."""
        seats: list[int] = []
        baggage = 0
        self.sharing.begin_plan(chunk.row for chunk in chunks)
        while budget > 0 and self.rows.num_free and (request := self.first_waiting()) is not None:
            found = self.sharing.match(request)
            if self.sharing.should_wait(request, found):
                break
            if seats and self.tables.num_new + len(found) > self.limits.max_found_blocks:
                break
            if seats and baggage + request.most_baggage > self.limits.max_baggage:
                break
            shared = self.tables.held(found)
            num_cached = len(found) * self.limits.block_size
            needed = self.limits.most_blocks(len(request.tokens), num_cached) - len(shared)
            if needed > self.pool.num_available - self.pool.num_idle(shared):
                break
            self._announce(request)
            baggage += request.most_baggage
            del self._waiting[request.id]
            row = self._seat(request, found)
            budget -= self._plan_chunk(row, budget, chunks)
            self.sharing.add_to_plan(row)
            seats.append(row)
        return seats

    def first_waiting(self) -> Request | None:
        """The request that is admitted next."""
        return next((request for request in self._waiting.values() if request not in self.holds), None)

    def _seat(self, request: Request, found: list[Entry]) -> int:
        row = self.rows.seat(request)
        self.tables.share(row, found)
        cached = len(found) * self.limits.block_size
        self.rows.cursor[row] = cached
        self.sharing.adopt(row, found)
        self._prefilling.append(row)
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached = cached
            self.counters.num_prompt_tokens += request.num_prompt
            self.counters.num_cached_tokens += cached
        return row

    def _promise(self, decodes: LongArray, widths: IntArray, chunks: list[Chunk], seats: list[int]) -> Plan:
        rows = self.rows
        sampling = [chunk.row for chunk in chunks if chunk.samples]
        for chunk in chunks:
            rows.cursor[chunk.row] = chunk.length
            self.sharing.register(chunk.row)
        self._fed = [chunk.row for chunk in chunks]
        for row in sampling:
            self._prefilling.remove(row)
        rows.decoding[sampling] = True
        rows.cursor[decodes] += widths if len(widths) else 1
        samples = np.concatenate((decodes, sampling)).astype(np.int64) if sampling else decodes
        rows.pending[samples] += 1
        if len(widths):
            rows.pending[decodes] += widths - 1
        score_samples, num_top = self.scoring.wanted(samples, chunks)
        mask_samples, waits = rows.masks_due(samples) if rows.num_controlled else (NOTHING, False)
        self.counters.num_steps += 1
        plan = Plan(
            step=self.counters.num_steps,
            decode_rows=decodes.astype(np.int32),
            chunks=tuple(chunks),
            new_blocks=self.tables.take_new(self._preempted),
            sample_rows=samples.astype(np.int32),
            sample_epochs=rows.epoch[samples],
            max_decode_length=int(rows.cursor[decodes].max()) if len(decodes) else 0,
            needs=rows.needs_of(samples),
            decode_widths=widths,
            seat_rows=np.array(seats, np.int32) if seats else NOTHING,
            seats=rows.seat_words(seats) if seats else NO_SEATS,
            baggage=rows.baggage(seats) if seats else NO_BAGGAGE,
            score_samples=score_samples,
            num_top=num_top,
            mask_samples=mask_samples,
            process_samples=rows.processed_among(samples) if rows.num_controlled else NOTHING,
            waits=waits,
        )
        self.pace.begin(plan)
        return plan

    # -- facts ---------------------------------------------------------------------------------------------------

    def commit(self, plan: Plan, results: IntArray) -> Commit:
        """Settle a step that came back with these results."""
        self.pace.end(plan)
        return self.facts.settle(plan, results)

    def force(self, runs: Sequence[tuple[Request, Sequence[int]]]) -> Commit:
        """Tokens that must come become facts at once, and are fed in one step, where that saves more than it costs.

        A run of n tokens saves its row n - 1 steps, and the chunk delays every row. Each of the requests has one sample
        in flight that is not a fact, the first of its run.
        """
        runs = [(request, run[: request.limit - int(self.rows.num_tokens[request.row])]) for request, run in runs]
        runs = [(request, run) for request, run in runs if len(run) > 1]
        num_saved = sum(len(run) - 1 for _, run in runs)
        if num_saved <= (0 if self._prefilling else self._chunk_cost * self.num_running):
            return Commit(0, (), ())
        return self._foresee({request.row: run for request, run in runs})

    def _foresee(self, runs: Mapping[int, Sequence[int]]) -> Commit:
        found = self.facts.foresee(runs)
        fed = [row for row in runs if self.rows.request[row] is not None]
        self.rows.decoding[fed] = False
        self._prefilling = sorted(self._prefilling + fed, key=lambda row: self.rows.arrival[row])
        return found

    def fail(self, plan: Plan, error: BaseException) -> Commit:
        """Settle a step that raised: end its requests, and compute all others again from their facts.

        The step may have left unwritten any block that it was to fill, and other requests may share those blocks. A
        step that was planned before an earlier failure was settled wrote nothing that is still used, so its failure
        affects no request. Otherwise requests that start again would never see one of their own steps come back while
        all steps fail.
        """
        self.pace.end(plan)
        if plan.step <= self._last_purged_step:
            return Commit(0, (), ())
        self._last_purged_step = self.counters.num_steps
        planned = {(chunk.row, chunk.epoch) for chunk in plan.chunks}
        planned.update(zip(plan.sample_rows.tolist(), plan.sample_epochs.tolist(), strict=True))
        seated = [request for request in self._requests.values() if request.row >= 0]
        failed = [request for request in seated if (request.row, int(self.rows.epoch[request.row])) in planned]
        finished = [self._finish(request, "error", error) for request in failed]
        for request in sorted((r for r in seated if r.row >= 0), key=lambda r: -r.arrival):
            self._step_back(request)
        self.pool.clear_cache()
        return Commit(0, (), tuple(finished))

    def _finish(self, request: Request, reason: str, error: BaseException | None = None) -> Finished:
        if request.row >= 0:
            self._leave_row(request)
        else:
            del self._waiting[request.id]
        del self._requests[request.id]
        self.holds.release(request)
        return Finished(request, reason, error)

    def _step_back(self, request: Request) -> None:
        """Move a request with its known tokens from its row to the head of the queue."""
        self._leave_row(request)
        self._waiting[request.id] = request
        self._waiting.move_to_end(request.id, last=False)

    def _leave_row(self, request: Request) -> None:
        row = request.row
        if not self.rows.decoding[row]:
            self._prefilling.remove(row)
        self.rows.unseat(request)
        self.tables.release(row)

    def check(self) -> None:
        """Assert that rows and blocks are conserved. For tests and the checking mode."""
        self.rows.check()
        seated = [request for request in self._requests.values() if request.row >= 0]
        self.pool.check([self.tables.blocks_of(request.row) for request in seated])
        assert len(seated) == self.rows.num_rows - self.rows.num_free == self.num_running
        by_arrival = sorted(seated, key=lambda request: request.arrival)
        assert self._prefilling == [request.row for request in by_arrival if not self.rows.decoding[request.row]]
        self.sharing.check(request.row for request in seated)
        arrivals = [request.arrival for request in self._waiting.values()]
        assert arrivals == sorted(arrivals), "the queue lost its order"
