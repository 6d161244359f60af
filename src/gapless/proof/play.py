"""Plays one schedule: the real loop, scheduler, slots and streams, step by step and without a clock.

Arrivals and aborts come before the step that the schedule names, or as soon as nothing else is left to run. So a run
depends only on the schedule. Collects tokens, batches and errors, but does not judge them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from gapless.core.guide import MASK_BITS
from gapless.core.outcome import Commit, Counters, Finished, Progress
from gapless.core.plan import Plan
from gapless.core.request import IntArray, Request, int_array
from gapless.core.scheduler import Scheduler
from gapless.device.base import Buffer
from gapless.device.checker import CheckedDevice
from gapless.errors import RaceError, StepFailed
from gapless.pipeline.checked import CheckedExecutor, MakeExecutor, poison_of
from gapless.pipeline.depth import FixedDepth
from gapless.pipeline.executor import Executor, FillMasks, LocalExecutor, StepRunner, Ticket
from gapless.pipeline.loop import run_loop
from gapless.proof.schedule import Ask, Schedule
from gapless.proof.scores import RequestScores
from gapless.proof.stage import Cast, Stage
from gapless.runner.calls import Call
from gapless.runner.fill import Filled
from gapless.text.transcript import Transcript

JUNK = 7  # in fresh KV memory that is not cleared: attention may read it where its weight is 0


@dataclass(frozen=True, slots=True)
class Watch:
    """The detectors that are on while a schedule is played."""

    conflicts: bool = True  # the happens-before checker, the block ledger, poison
    invariants: bool = True  # rows and blocks conserved between steps


ALL = Watch()


@dataclass(frozen=True, slots=True)
class Trouble:
    """An error that ended a run early, or should have."""

    kind: str  # "conflict", "invariant", "tokens" or "log-probabilities"
    message: str


class Member(NamedTuple):
    """A request in a step, as the device sees it."""

    request: str
    start: int  # its first position
    num_positions: int
    kind: str  # "decode", "chunk", or "last chunk", which is followed by a sample
    num_targets: int = 0  # prompt tokens whose log-probabilities this chunk gives


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: its members, and the tokens it sampled; none when it failed."""

    members: tuple[Member, ...]
    tokens: tuple[int, ...] = ()  # of the sampled members
    scores: tuple[int, ...] = ()  # log-probabilities, bit for bit as the step gave them
    num_scores: int = 0


@dataclass(slots=True)
class Played:
    """The result of a schedule."""

    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    scores: dict[str, RequestScores] = field(default_factory=dict)
    streamed: dict[str, list[Progress]] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    num_accesses: int = 0  # of buffers, checked
    num_block_reads: int = 0  # places of the KV cache, checked
    trouble: Trouble | None = None


def play(
    stage: Stage,
    schedule: Schedule,
    watch: Watch = ALL,
    *,
    make_executor: MakeExecutor = LocalExecutor,
) -> Played:
    """Play a schedule on its own scheduler, streams and slots."""
    played = Played()
    try:
        Player(stage, schedule, watch, played, make_executor).run()
    except RaceError as error:
        played.trouble = Trouble("conflict", str(error))
    except Exception as error:  # an assertion, or whatever our own mistake leads to
        played.trouble = Trouble("invariant", f"{type(error).__name__}: {error}")
    return played


class Player:
    """One run. Feeds the loop and takes its results."""

    def __init__(
        self,
        stage: Stage,
        schedule: Schedule,
        watch: Watch,
        played: Played,
        make_executor: MakeExecutor,
    ) -> None:
        self._schedule, self._watch, self._played = schedule, watch, played
        self._scheduler = Scheduler(replace(schedule.limits, windows=stage.room.windows))
        self._coming = sorted(schedule.asks, key=lambda ask: ask.arrival)
        self._aborts = {ask.id: ask.abort for ask in schedule.asks if ask.abort is not None}
        self._stopped: list[str] = []  # ended on the output side, not yet known to the scheduler
        self._texts: dict[str, Transcript] = {}
        self._tokenizer = stage.tokenizer
        self._turns_left = _turn_bound(schedule)
        self._device = stage.device(schedule.order, threads=schedule.threads, check=watch.conflicts)
        cast = stage.cast(schedule.block_size)
        self._vocab_size = MASK_BITS * cast.runner.mask_words  # and a few more, which never come
        self._executor = self._make_executor(cast, make_executor)

    def run(self) -> None:
        failures = self._schedule.failures if self._watch.invariants else None
        recorder = NotingExecutor(self._executor, self._scheduler, self._played, failures, self._schedule.depth)
        try:
            run_loop(self._scheduler, recorder, FixedDepth(self._schedule.depth), self._admit, self._deliver)
        finally:
            self._executor.close()
            self._count()
        if self._watch.invariants:
            self._check_empty()

    def _make_executor(self, cast: Cast, make: MakeExecutor) -> Executor:
        junk = poison_of(cast.kv.places[0].dtype) if self._watch.conflicts else JUNK
        self._device.stream("compute").run(lambda: forget(cast, junk), "forget", writes=cast.runner.buffers)
        runner = Failing(cast.runner, self._schedule.failures)
        depth = self._schedule.depth
        if not self._watch.conflicts:
            return make(self._device, runner, cast.limits, depth)
        return CheckedExecutor(self._device, runner, cast.limits, depth, self._scheduler, cast.kv, make)

    def _admit(self, idle: bool) -> bool:
        self._turns_left -= 1
        assert self._turns_left > 0, "somebody waits for ever"
        if self._watch.invariants:
            self._scheduler.check()
        now = self._scheduler.counters.num_steps
        for request_id in self._stopped:
            self._finish(self._scheduler.abort(request_id, "stop"))
        self._stopped.clear()
        while self._coming and (self._coming[0].arrival <= now or (idle and not self._scheduler.has_requests)):
            self._add(self._coming.pop(0))
        for request_id in [id for id, step in self._aborts.items() if step <= now]:
            if all(ask.id != request_id for ask in self._coming):
                del self._aborts[request_id]
                self._finish(self._scheduler.abort(request_id))
        return bool(self._coming) or self._scheduler.has_requests

    def _add(self, ask: Ask) -> None:
        request = Request(
            id=ask.id,
            prompt=int_array(ask.prompt),
            params=ask.params,
            seed=ask.seed,
            stop_ids=ask.stop_ids,
            limit=min(ask.length, self._schedule.max_model_len),
            streams=True,
            guide=ask.guide(self._vocab_size),
        )
        self._texts[ask.id] = Transcript(self._tokenizer, ask.params.stop, min_tokens=ask.params.min_tokens)
        self._scheduler.add(request)

    def _deliver(self, commit: Commit) -> None:
        for progress in commit.progress:
            self._stream(progress)
        for finished in commit.finished:
            self._finish(finished)

    def _stream(self, progress: Progress) -> None:
        name = progress.request.id
        self._played.streamed.setdefault(name, []).append(progress)
        text = self._texts[name]
        if text.take((progress.token,)).token_ids and text.stop is not None:
            self._stopped.append(name)

    def _finish(self, finished: Finished | None) -> None:
        if finished is None:
            return
        request = finished.request
        assert request.id not in self._played.reasons, f"request {request.id!r} ended twice"
        text = self._texts[request.id]
        text.take(request.tokens[request.num_prompt + len(text.token_ids) :].tolist(), finished.reason)
        self._played.tokens[request.id] = tuple(text.token_ids)
        self._played.scores[request.id] = RequestScores.of(request, len(text.token_ids))
        self._played.reasons[request.id] = text.finish_reason or finished.reason

    def _count(self) -> None:
        self._played.counters = self._scheduler.counters
        if isinstance(self._device, CheckedDevice):
            self._played.num_accesses = self._device.checker.num_accesses
        if isinstance(self._executor, CheckedExecutor):
            self._played.num_block_reads = self._executor.ledger.num_reads

    def _check_empty(self) -> None:
        scheduler = self._scheduler
        scheduler.check()
        assert not scheduler.has_requests, "requests are left"
        assert scheduler.rows.num_free == scheduler.limits.num_rows, "a row leaked"
        assert scheduler.pool.num_available == scheduler.limits.num_blocks, "a block leaked"
        missing = [ask.id for ask in self._schedule.asks if ask.id not in self._played.reasons]
        assert not missing, f"requests never ended: {missing}"


class Failing:
    """A runner that raises at chosen steps."""

    def __init__(self, inner: StepRunner, failures: Sequence[int]) -> None:
        self.buffers: Sequence[Buffer] = inner.buffers
        self.mask_words = inner.mask_words
        self.fill, self.sample = inner.fill, inner.sample
        self._inner = inner
        self._failures = failures

    def step(self, filled: Filled, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        self._fail(filled.plan.step)
        self._inner.step(filled, packed_plan, out)

    def forward(self, filled: Filled, packed_plan: torch.Tensor) -> None:
        self._fail(filled.plan.step)
        self._inner.forward(filled, packed_plan)

    def _fail(self, step: int) -> None:
        if step in self._failures:
            raise RuntimeError(f"step {step} was made to fail")


@torch.inference_mode()
def forget(cast: Cast, junk: float) -> None:
    """Clear KV memory of earlier runs. Rows may keep their content: no correct step reads it."""
    for place in cast.kv.places:
        place[: cast.limits.num_blocks] = junk
        place[cast.limits.num_blocks :] = 0  # nobody's, and never over


class NotingExecutor:
    """An executor that records each step's members and samples, and knows which steps must fail."""

    def __init__(
        self, inner: Executor, scheduler: Scheduler, played: Played, failures: Sequence[int] | None, depth: int
    ) -> None:
        self._inner = inner
        self._scheduler = scheduler
        self._batches = played.batches
        self._failures = failures  # None: nobody asks
        self._depth = depth

    def launch(self, plan: Plan) -> Ticket:
        rows = self._scheduler.rows
        decodes = [Member(self._name(row), int(rows.cursor[row]) - 1, 1, "decode") for row in plan.decode_rows.tolist()]
        chunks = [
            Member(
                self._name(chunk.row),
                chunk.start,
                len(chunk.tokens),
                "last chunk" if chunk.samples else "chunk",
                len(chunk.targets),
            )
            for chunk in plan.chunks
        ]
        self._batches.append(Batch((*decodes, *chunks)))
        return self._inner.launch(plan)

    def complete(self, ticket: Ticket, fill_masks: FillMasks, calls: tuple[Call, ...] = ()) -> Ticket:
        return self._inner.complete(ticket, fill_masks, calls)

    def collect(self, ticket: Ticket) -> IntArray:
        plan, step = ticket.plan, ticket.plan.step
        try:
            results = self._inner.collect(ticket)
        except StepFailed:
            assert self._may_fail(step), f"step {step} came back as failed, and was not"
            raise
        assert step not in (self._failures or ()), f"step {step} failed, and came back as if it had not"
        index = step - 1
        tokens, scores = (tuple(part.tolist()) for part in np.split(results, [plan.num_samples]))
        self._batches[index] = Batch(self._batches[index].members, tokens, scores, plan.num_scores)
        return results

    def close(self) -> None:
        self._inner.close()

    def _may_fail(self, step: int) -> bool:
        """Its own failure, or that of a step which it was launched behind."""
        return self._failures is None or any(failed <= step < failed + self._depth for failed in self._failures)

    def _name(self, row: int) -> str:
        request = self._scheduler.rows.request[row]
        return request.id if request is not None else "nobody"


def _turn_bound(schedule: Schedule) -> int:
    """The oldest request advances by a token in each turn, and starts again after each failure."""
    work = sum(ask.length + schedule.depth + 2 for ask in schedule.asks)
    last = max((max(ask.arrival, ask.abort or 0) for ask in schedule.asks), default=0)
    return 16 + last + schedule.depth + work * (1 + len(schedule.failures))
