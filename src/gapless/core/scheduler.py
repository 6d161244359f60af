"""Decides what runs next, on promises, and turns results into facts.

The only writer of requests and rows: `schedule` promises (cursor, pending), `commit` settles. Older requests come
first: they are admitted first and grow first. When blocks run out, the latest arrival is preempted, and computed again
from its known tokens. So the oldest always advances, and no request waits for ever. Knows no tensors, no device and no
text.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from gapless.core.block_pool import BlockPool
from gapless.core.limits import Limits, check_fits
from gapless.core.making import Making
from gapless.core.outcome import Commit, Counters, Finished, Progress, token_logprob
from gapless.core.pace import Pace
from gapless.core.plan import NO_SEATS, NOTHING, Chunk, Plan, score_width
from gapless.core.prefix_index import ROOT, PrefixIndex
from gapless.core.request import IntArray, LongArray, Request, RowTable, int_array
from gapless.core.row_fields import need
from gapless.errors import InvalidRequest, ModelError

MIN_TOKENS = need("min_total")
NO_BLOCKS = np.empty((0, 3), np.int32)
NOT_FINITE = "the weights are damaged, or their data type overflows: try dtype float32"


class Scheduler:
    """Requests in, plans out; results in, facts out."""

    def __init__(
        self,
        limits: Limits,
        announce: Callable[[Request], None] = lambda request: None,
        pace: Pace | None = None,
    ) -> None:
        """announce: called with each request that is about to get a row, before any other work for it."""
        self.limits = limits
        self.pace = pace or Pace(math.inf, limits.max_batch_tokens)
        self._announce = announce
        self.rows = RowTable(limits.num_rows, limits.max_model_len, limits.block_size)
        self.pool = BlockPool(limits.num_blocks, PrefixIndex(limits.block_size))
        self.counters = Counters()
        self._waiting: OrderedDict[str, Request] = OrderedDict()  # by arrival
        self._prefilling: list[int] = []  # rows, by arrival
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._new_blocks: list[tuple[int, int, int]] = []  # of the plan under construction
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

    def add(self, request: Request) -> None:
        """Queue a request. One that could never run is refused here, with the numbers."""
        check_fits(request, self.limits)
        if request.id in self._requests or request.was_admitted:
            raise InvalidRequest(f"request {request.id!r} was submitted before; make a new one")
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._requests[request.id] = request
        self._waiting[request.id] = request

    def abort(self, request_id: str, reason: str = "abort") -> Finished | None:
        """End a request now, even with steps in flight. None if it is unknown or has ended."""
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, reason)

    def abort_all(self) -> tuple[Finished, ...]:
        """End every request."""
        return tuple(self._finish(request, "abort") for request in list(self._requests.values()))

    # -- promises ------------------------------------------------------------------------------------------------

    def schedule(self) -> Plan | None:
        """Plan the next step, or None when nothing can run until a step in flight comes back."""
        self._new_blocks.clear()
        self._preempted.clear()
        decodes = self._plan_decodes()
        budget = self._budget(decodes)
        chunks: list[Chunk] = []
        for row in list(self._prefilling):
            if row in self._preempted:
                continue
            budget -= self._plan_chunk(row, budget, chunks)
        seats = self._admit(budget, chunks) if not self._preempted else []
        if self._preempted:  # later arrivals were preempted after they were planned
            decodes = decodes[self.rows.decoding[decodes]]
            chunks = [chunk for chunk in chunks if chunk.row not in self._preempted]
        if len(decodes) == 0 and not chunks:
            return None
        return self._promise(decodes, chunks, seats)

    def _budget(self, decodes: LongArray) -> int:
        """Most prompt tokens of the step: as many as fit, or fewer where a long step would delay a stream."""
        fits = self.limits.max_batch_tokens - len(decodes)
        if (self._prefilling or self._waiting) and self.rows.streams[decodes].any():
            return min(fits, self.pace.chunk_tokens(len(decodes)))
        return fits

    def _plan_decodes(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        rows = self.rows
        ready = np.flatnonzero(rows.decoding & (rows.num_tokens + rows.pending < rows.limit))
        cramped = rows.cursor[ready] >= rows.num_blocks[ready] * self.limits.block_size
        if not cramped.any():
            return ready
        stalled = []
        short = ready[cramped]
        for row in short[np.argsort(rows.arrival[short])].tolist():
            if row not in self._preempted and self._grow(row, int(rows.cursor[row]) + 1) == 0:
                stalled.append(row)
        return ready[~np.isin(ready, stalled)] if stalled else ready

    def _plan_chunk(self, row: int, budget: int, chunks: list[Chunk]) -> int:
        start = int(self.rows.cursor[row])
        known = int(self.rows.num_tokens[row])
        count = self._grow(row, min(known, start + budget)) if budget > 0 else 0
        if count > 0:
            tokens = int_array(self.rows.tokens[row, start : start + count].copy())
            targets, scored_from = self._targets(row, start, start + count)
            samples = start + count == known
            chunks.append(Chunk(row, int(self.rows.epoch[row]), start, tokens, samples, targets, scored_from))
        return count

    def _targets(self, row: int, start: int, end: int) -> tuple[IntArray, int]:
        """Prompt tokens that follow these positions and still need log-probabilities, and where they start.

        A row's chunks run in order from a cursor that lies no further than the known tokens, so none is skipped.
        """
        request = self.rows.request[row]
        if request is None or not request.lacks_prompt_scores:
            return NOTHING, 0
        first = max(start, request.num_prompt_scores)
        return request.prompt[first + 1 : end + 1], first

    def _grow(self, row: int, length: int) -> int:
        """Give the row blocks up to `length` tokens, preempting later arrivals; return how many fit past its cursor."""
        size, count = self.limits.block_size, int(self.rows.num_blocks[row])
        while count * size < length:
            block = self.pool.allocate()
            if block is None:
                if not self._preempt_after(int(self.rows.arrival[row])):
                    break
                continue
            self._append_block(row, count, block)
            count += 1
        return max(0, min(length, count * size) - int(self.rows.cursor[row]))

    def _append_block(self, row: int, index: int, block: int) -> None:
        self.rows.blocks[row, index] = block
        self.rows.num_blocks[row] = index + 1
        self._new_blocks.append((row, index, block))

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
        making = self._making(chunks) if self._waiting and self.limits.prefix_cache else None
        while self._waiting and budget > 0 and self.rows.num_free:
            request = next(iter(self._waiting.values()))
            blocks, entry = self._match(request)
            found = len(blocks) * self.limits.block_size
            if making is not None and making.is_worth_a_step(_findable(request), found, entry):
                break
            if seats and len(self._new_blocks) + len(blocks) > self.limits.max_found_blocks:
                break
            needed = -(-len(request.tokens) // self.limits.block_size) - len(blocks)
            if needed > self.pool.num_available - self.pool.num_idle(blocks):
                break
            self._announce(request)
            del self._waiting[request.id]
            row = self._seat(request, blocks, entry)
            budget -= self._plan_chunk(row, budget, chunks)
            if making is not None:
                making.add(row)
            seats.append(row)
        return seats

    def _making(self, chunks: list[Chunk]) -> Making:
        making = Making(self.rows, self.limits.block_size)
        for chunk in chunks:
            making.add(chunk.row)
        return making

    def _match(self, request: Request) -> tuple[list[int], int]:
        if not self.limits.prefix_cache:
            return [], ROOT
        tokens = _findable(request)
        return self.pool.index.match(tokens, len(tokens))

    def _seat(self, request: Request, blocks: list[int], entry: int) -> int:
        row = self.rows.seat(request)
        self.pool.share(blocks)
        for index, block in enumerate(blocks):
            self._append_block(row, index, block)
        cached = len(blocks) * self.limits.block_size
        self.rows.cursor[row] = cached
        self.rows.chain[row], self.rows.num_chained[row] = entry, len(blocks)
        self._prefilling.append(row)
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached = cached
            self.counters.num_prompt_tokens += request.num_prompt
            self.counters.num_cached_tokens += cached
        return row

    def _promise(
        self, decodes: np.ndarray[tuple[int], np.dtype[np.int64]], chunks: list[Chunk], seats: list[int]
    ) -> Plan:
        rows = self.rows
        sampling = [chunk.row for chunk in chunks if chunk.samples]
        for chunk in chunks:
            rows.cursor[chunk.row] = chunk.length
            self._register(chunk.row)
        for row in sampling:
            self._prefilling.remove(row)
        rows.decoding[sampling] = True
        rows.cursor[decodes] += 1
        samples = np.concatenate((decodes, sampling)).astype(np.int64) if sampling else decodes
        rows.pending[samples] += 1
        score_samples, num_top = self._wanted_scores(samples, chunks)
        self.counters.num_steps += 1
        plan = Plan(
            step=self.counters.num_steps,
            decode_rows=decodes.astype(np.int32),
            chunks=tuple(chunks),
            new_blocks=self._take_new_blocks(),
            sample_rows=samples.astype(np.int32),
            sample_epochs=rows.epoch[samples],
            max_decode_length=int(rows.cursor[decodes].max()) if len(decodes) else 0,
            needs=self._needs(samples),
            seat_rows=np.array(seats, np.int32) if seats else NOTHING,
            seats=rows.seat_words(seats) if seats else NO_SEATS,
            score_samples=score_samples,
            num_top=num_top,
        )
        self.pace.begin(plan)
        return plan

    def _needs(self, samples: LongArray) -> int:
        """The needs of all samples. A minimum length that was reached no longer counts."""
        rows = self.rows
        needs = int(np.bitwise_or.reduce(rows.needs[samples]))
        if needs & MIN_TOKENS:
            promised = rows.num_tokens[samples] + rows.pending[samples]
            needs -= MIN_TOKENS if not (promised < rows.min_total[samples]).any() else 0
        return needs

    def _wanted_scores(self, samples: LongArray, chunks: list[Chunk]) -> tuple[IntArray, int]:
        """Which samples need log-probabilities, and the largest k of the step."""
        rows = self.rows
        if rows.num_scoring == 0:
            return NOTHING, 0
        wanted = rows.num_logprobs[samples]
        most = max(int(wanted.max(initial=-1)), 0)
        for chunk in chunks:
            if len(chunk.targets):
                request = rows.request[chunk.row]
                assert request is not None
                most = max(most, request.params.prompt_logprobs or 0)
        return np.flatnonzero(wanted >= 0).astype(np.int32), most

    def _take_new_blocks(self) -> IntArray:
        kept = [entry for entry in self._new_blocks if entry[0] not in self._preempted]
        return np.array(kept, np.int32) if kept else NO_BLOCKS

    # -- facts ---------------------------------------------------------------------------------------------------

    def commit(self, plan: Plan, results: IntArray) -> Commit:
        """Settle a step: `results[i]` was sampled for `plan.sample_rows[i]`; the plan's scores follow."""
        rows = self.rows
        self.pace.end(plan)
        sampled, tokens = plan.sample_rows, results[: plan.num_samples]
        live = rows.epoch[sampled] == plan.sample_epochs
        if plan.num_scores:
            self._keep_scores(plan, live, results[plan.num_samples :].reshape(-1, score_width(plan.num_top)))
        if not live.all():
            self.counters.num_overrun += int(len(live) - live.sum())
            sampled, tokens = sampled[live], tokens[live]
        finished: list[Finished] = []
        if (missing := tokens < 0).any():  # NO_SAMPLE
            finished += [self._finish_without_sample(row) for row in sampled[missing].tolist()]
            sampled, tokens = sampled[~missing], tokens[~missing]
        rows.tokens[sampled, rows.num_tokens[sampled]] = tokens
        rows.num_tokens[sampled] += 1
        rows.pending[sampled] -= 1
        total = rows.num_tokens[sampled]
        self.counters.num_generated += len(sampled)
        self._register_full(sampled, total)
        progress = self._progress(sampled, tokens)
        stopped = (tokens[:, None] == rows.stop_ids[sampled]).any(axis=1) & (total >= rows.min_total[sampled])
        over = stopped | (total >= rows.limit[sampled])
        if not over.any():
            return Commit(len(sampled), progress, tuple(finished))
        for row, stop in zip(sampled[over].tolist(), stopped[over].tolist(), strict=True):
            request = rows.request[row]
            assert request is not None
            finished.append(self._finish(request, "stop" if stop else "length"))
        return Commit(len(sampled), progress, tuple(finished))

    def _finish_without_sample(self, row: int) -> Finished:
        """End a request whose largest logit was not a finite number."""
        request = self.rows.request[row]
        assert request is not None
        error = ModelError(f"the logits at position {self.rows.num_tokens[row]} are not finite; {NOT_FINITE}")
        return self._finish(request, "error", error)

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

    def _progress(self, sampled: IntArray, tokens: IntArray) -> tuple[Progress, ...]:
        streaming = self.rows.streams[sampled]
        if not streaming.any():
            return ()
        pairs = zip(sampled[streaming].tolist(), tokens[streaming].tolist(), strict=True)
        return tuple(_progress(request, token) for row, token in pairs if (request := self.rows.request[row]))

    def _keep_scores(self, plan: Plan, live: npt.NDArray[np.bool_], scores: IntArray) -> None:
        """Give each request its own scores, as copies, so that none keeps a whole step's in memory."""
        rows, wanting = self.rows, plan.score_samples
        kept = live[wanting]
        for row, score in zip(plan.sample_rows[wanting[kept]].tolist(), scores[: len(wanting)][kept], strict=True):
            request = rows.request[row]
            assert request is not None
            request.scores.append(score.copy())
        end = len(wanting)
        for chunk in plan.chunks:
            start, end = end, end + len(chunk.targets)
            request = rows.request[chunk.row]
            if end > start and request is not None and rows.epoch[chunk.row] == chunk.epoch:
                request.prompt_scores.append(scores[start:end].copy())

    def _register_full(self, sampled: IntArray, total: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        if self.limits.prefix_cache:
            for row in sampled[(total - 1) % self.limits.block_size == 0].tolist():
                self._register(row)

    def _register(self, row: int) -> None:
        """Make the row's blocks findable that are full of facts and written by a planned or launched step."""
        if not self.limits.prefix_cache:
            return
        rows, size = self.rows, self.limits.block_size
        full = min(int(rows.cursor[row]), int(rows.num_tokens[row])) // size
        for index in range(rows.num_chained[row], full):
            tokens = rows.tokens[row, index * size : (index + 1) * size]
            rows.chain[row] = self.pool.index.insert(rows.chain[row], tokens, int(rows.blocks[row, index]))
        rows.num_chained[row] = max(full, rows.num_chained[row])

    def _finish(self, request: Request, reason: str, error: BaseException | None = None) -> Finished:
        if request.row >= 0:
            self._leave_row(request)
        else:
            del self._waiting[request.id]
        del self._requests[request.id]
        return Finished(request, reason, error)

    def _step_back(self, request: Request) -> None:
        """Move a request with its known tokens from its row to the head of the queue."""
        self._leave_row(request)
        self._waiting[request.id] = request
        self._waiting.move_to_end(request.id, last=False)

    def _leave_row(self, request: Request) -> None:
        row = request.row
        blocks: list[int] = self.rows.blocks[row, : self.rows.num_blocks[row]].tolist()
        if not self.rows.decoding[row]:
            self._prefilling.remove(row)
        self.rows.unseat(request)
        self.pool.release(blocks)

    # -- invariants ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that rows and blocks are conserved. For tests and the checking mode."""
        self.rows.check()
        seated = [request.row for request in self._requests.values() if request.row >= 0]
        self.pool.check([self.rows.blocks[row, : self.rows.num_blocks[row]].tolist() for row in seated])
        assert len(seated) == self.rows.num_rows - self.rows.num_free == self.num_running
        assert self._prefilling == [row for row in _by_arrival(self.rows, seated) if not self.rows.decoding[row]]
        known = [self.rows.num_chained[row] * self.limits.block_size <= self.rows.num_tokens[row] for row in seated]
        assert all(known), "a block can be found whose tokens nobody knows yet"
        arrivals = [request.arrival for request in self._waiting.values()]
        assert arrivals == sorted(arrivals), "the queue lost its order"


def _findable(request: Request) -> IntArray:
    """The first tokens of the request that may come from the cache."""
    length = len(request.tokens) - 1  # one is left to compute: its logits
    if request.lacks_prompt_scores:  # positions that are found in the cache have no logits
        length = min(length, request.num_prompt_scores)
    return request.tokens[:length]


def _progress(request: Request, token: int) -> Progress:
    num_top = request.params.logprobs
    if num_top is None:
        return Progress(request, token)
    return Progress(request, token, token_logprob(token, request.scores[-1], num_top))


def _by_arrival(rows: RowTable, seated: Iterable[int]) -> list[int]:
    return sorted(seated, key=lambda row: int(rows.arrival[row]))
