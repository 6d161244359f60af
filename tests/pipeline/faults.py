"""One thing wrong in the scheduler, the rows, the pool, the index or the sampler; and what sees it, mistake by mistake.

    python tests/pipeline/faults.py        prints the table of all mistakes, those of mutants.py too

Each mistake is made alone, by patching one function, and the same schedules are played with each of three detectors by
itself: the checker (happens-before, block ledger, poison), the tokens (against the toy's truth), the invariants
(conservation of rows and blocks, and the assertions of the code). A mistake that nobody sees fails the suite.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from mutants import MISTAKES, Mistake

import gapless.runner.fill
import gapless.runner.runner
import gapless.runner.sampler
from gapless.core.block_pool import BlockPool
from gapless.core.params import SamplingParams
from gapless.core.plan import Plan
from gapless.core.prefix_index import ROOT, PrefixIndex
from gapless.core.request import IntArray, Request, RowTable, int_array
from gapless.core.scheduler import NO_BLOCKS, Scheduler
from gapless.device.base import Device
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.pipeline.checked import MakeExecutor
from gapless.pipeline.executor import LocalExecutor, Ticket
from gapless.proof.play import Played, Watch, play
from gapless.proof.schedule import Ask, Schedule
from gapless.proof.stage import Cast, Room, fresh_device
from gapless.runner.row_store import RowStore
from gapless.runner.runner import Runner
from toy import toy_request, toy_requests, toy_runner, toy_truth

CHECKER, TOKENS, INVARIANT = DETECTORS = ("checker", "tokens", "invariant")
ANYBODY = "anybody"
WATCHES = {ANYBODY: Watch(), CHECKER: Watch(True, False), TOKENS: Watch(False, False), INVARIANT: Watch(False, True)}


# -- where and what is played --------------------------------------------------------------------------------------


class ToyStage:
    """The exact toy model as a stage for schedules."""

    room = Room(num_rows=8, num_places=192, max_batch_tokens=48, max_model_len=48)
    tokenizer = None

    def cast(self, block_size: int) -> Cast:
        limits = self.room.limits(block_size)
        runner = toy_runner(CpuDevice(driver=InlineDriver()), limits)
        return Cast(runner, [runner.buffers[1].tensor.view(-1, block_size)], limits)

    def device(self, order: int | None, *, threads: bool, check: bool) -> Device:
        return fresh_device("cpu", order, threads=threads, check=check)


STAGE = ToyStage()


@cache
def schedules() -> list[Schedule]:
    """Made so that blocks run out, steps fail, requests share prefixes, are aborted and would stop too early."""
    asks = tuple(Ask(r.id, tuple(r.prompt.tolist()), r.params, r.seed, r.stop_ids) for r in (*toy_requests(), _eager()))
    late = tuple(replace(ask, arrival=2 * number) for number, ask in enumerate(asks))
    aborted = tuple(replace(ask, abort=7) if ask.id in "bg" else ask for ask in late)
    plain = Schedule(asks, num_rows=4, num_blocks=24, block_size=4, max_batch_tokens=12, max_model_len=48, order=3)
    return [
        replace(plain, depth=2),
        replace(plain, asks=late, num_blocks=9, depth=3, order=1),
        replace(plain, asks=aborted, num_rows=2, max_batch_tokens=5, depth=2, order=5),
        replace(plain, asks=late, failures=(4, 9), depth=3, order=2),
        replace(plain, asks=late, num_rows=6, num_blocks=12, block_size=3, depth=2, order=8),
        replace(plain, asks=_alike(), failures=(1,), depth=2),
        replace(plain, asks=_alike(), block_size=2, depth=3),
    ]


def _eager() -> Request:
    """Would stop at its first token, if it were not for its minimum length."""
    plain = toy_request("h", [2, 7, 1])
    return toy_request("h", [2, 7, 1], stop_token_ids=tuple(toy_truth(plain)[:2]), min_tokens=3)


def _alike() -> tuple[Ask, ...]:
    """The second shares a prefix that the first is still computing; the fourth begins as the third goes on; the fifth
    is nothing but a prefix."""
    shared = tuple(range(1, 14))
    prompts = [(*shared, 20), (*shared, 30), (9, 9, 9, 9, 5, 6, 7, 8, 1), (5, 6, 7, 8, 2), shared[:12]]
    params = SamplingParams(max_tokens=8, temperature=0)
    return tuple(Ask(f"p{number}", prompt, params, 0, arrival=number) for number, prompt in enumerate(prompts))


@cache
def truth(ask: Ask) -> tuple[int, ...]:
    limit = min(ask.length, STAGE.room.max_model_len)
    return tuple(toy_truth(Request(ask.id, int_array(ask.prompt), ask.params, ask.seed, ask.stop_ids, limit)))


def is_right(schedule: Schedule, played: Played) -> bool:
    return all(_has_its_tokens(ask, played, bool(schedule.failures)) for ask in schedule.asks)


def _has_its_tokens(ask: Ask, played: Played, failing: bool) -> bool:
    got, reason, right = played.tokens.get(ask.id, (-1,)), played.reasons.get(ask.id), truth(ask)
    if (reason == "abort" and ask.abort is not None) or (reason == "error" and failing):
        return got == right[: len(got)]
    return got == right and reason == ("stop" if right[-1] in ask.stop_ids else "length")


# -- mistakes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One mistake: a patch while it lasts, or an executor of its own."""

    name: str
    apply: Callable[[], AbstractContextManager[Any]] = nullcontext
    make: Callable[[], MakeExecutor] = lambda: LocalExecutor


def wrapping(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """A patch of one function by another that gets the original."""
    return lambda: patch.object(owner, name, wrap(getattr(owner, name)))


def fault(name: str, owner: Any, attribute: str) -> Callable[..., Fault]:
    """Register the decorated function, which wraps the original, as a mistake."""

    def register(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Fault:
        made = Fault(name, wrapping(owner, attribute, wrap))
        FAULTS.append(made)
        return made

    return register


FAULTS: list[Fault] = []


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
            self.pool.release(self.rows.blocks[row, : self.rows.num_blocks[row]].tolist())
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
    return lambda self, parent, tokens, block: original(self, ROOT, tokens, block)


@fault("a prefix match leaves no token to compute", Scheduler, "_match")
def _(original):
    def match(self: Scheduler, request: Request):
        if not self.limits.prefix_cache:
            return original(self, request)
        return self.pool.index.match(request.tokens, len(request.tokens))

    return match


@fault("blocks are registered before their tokens are known", Scheduler, "_register")
def _(original):
    def register(self: Scheduler, row: int) -> None:
        known = self.rows.num_tokens[row]
        self.rows.num_tokens[row] = max(known, self.rows.cursor[row])
        original(self, row)
        self.rows.num_tokens[row] = known

    return register


@fault("an entry of the block table never reaches the plan", Scheduler, "_take_new_blocks")
def _(original):
    def take(self: Scheduler) -> IntArray:
        found = original(self)
        return found[:-1] if len(found) > 1 else NO_BLOCKS if self.counters.num_steps % 4 == 3 else found

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
    def promise(self: Scheduler, decodes, chunks, seats) -> Plan:
        gone = [row for row in sorted(self._preempted) if row not in decodes and not self.rows.decoding[row]]
        return original(self, np.sort(np.concatenate((decodes, np.array(gone, np.int64)))), chunks, seats)

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
    def advance(self: RowStore, packed, tokens: torch.Tensor) -> None:
        original(self, packed, tokens.roll(1))

    return advance


@fault("a placeholder stays in the row after prefill", RowStore, "advance")
def _(original):
    def advance(self: RowStore, packed, tokens: torch.Tensor) -> None:
        original(self, packed, tokens)
        self.last_token[packed.chunk_rows.long()] = 0

    return advance


@fault("a row's last token is written one step late", RowStore, "advance")
def _(original):
    def advance(self: RowStore, packed, tokens: torch.Tensor) -> None:
        late = getattr(self, "late", None)
        original(self, packed, self.last_token[packed.sample_rows.long()])
        if late is not None:
            self.last_token[late[0]] = late[1]
        self.late = (packed.sample_rows.long().clone(), tokens.clone())

    return advance


@fault("lengths of decode rows are not advanced", RowStore, "advance")
def _(original):
    def advance(self: RowStore, packed, tokens: torch.Tensor) -> None:
        original(self, packed, tokens)
        self.length[packed.decode_rows.long()] -= 1

    return advance


@fault("the length after a chunk is one short", RowStore, "advance")
def _(original):
    return lambda self, packed, tokens: original(self, replace(packed, chunk_ends=packed.chunk_ends - 1), tokens)


@fault("padding points at a row that somebody has", RowStore, "advance")
def _(original):
    def advance(self: RowStore, packed, tokens: torch.Tensor) -> None:
        original(self, packed, tokens)
        stale = getattr(self, "previous", packed.decode_rows[:0])
        gone = stale[~torch.isin(stale, packed.decode_rows)].long()
        self.length[gone] += 1  # what a padded step does to its padding
        self.previous = packed.decode_rows.clone()

    return advance


@fault("a new owner's sampling state does not reach the device", RowStore, "_seat")
def _(original):
    return lambda self, seats: original(self, seats[:0])


@fault("seeds belong to rows and not to requests", RowStore, "_seat")
def _(original):
    def seat(self: RowStore, seats: torch.Tensor) -> None:
        original(self, seats)
        self.seed[seats[:, 0].long()] = seats[:, 0].long()

    return seat


@fault("random numbers are those of the position before", gapless.runner.sampler, "uniform")
def _(original):
    return lambda seed, place: original(seed, place - 1)


@fault("random numbers come from the order in the batch", gapless.runner.sampler, "uniform")
def _(original):
    return lambda seed, place: original(torch.arange(len(seed)), place)


@fault("the minimum length is known one token late", gapless.runner.fill, "_seat")
def _(original):
    return lambda seat: original(replace(seat, min_total=seat.min_total - 1))


@fault("the sampler is told of minimum lengths one step late", Scheduler, "_promise")
def _(original):
    def promise(self: Scheduler, decodes, chunks, seats) -> Plan:
        plan = original(self, decodes, chunks, seats)
        late = getattr(self, "late", False)
        self.late = plan.any_min_tokens
        return replace(plan, any_min_tokens=late)

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


def of_executor(mistake: Mistake) -> Fault:
    return Fault(mistake.name, make=lambda: partial(mistake.make, edit=mistake.edit()))


ALL = [of_executor(mistake) for mistake in MISTAKES] + FAULTS
NONE = Fault("none")


# -- who sees it -----------------------------------------------------------------------------------------------------


def seen_by(fault: Fault, detector: str) -> Iterator[str]:
    """Who sees the mistake while one detector looks, schedule after schedule."""
    for schedule in schedules():
        with fault.apply():
            played = play(STAGE, schedule, WATCHES[detector], make_executor=fault.make())
        if played.trouble is not None:
            yield CHECKER if played.trouble.kind == "conflict" else INVARIANT
        elif not is_right(schedule, played):
            yield TOKENS


def is_seen(fault: Fault) -> bool:
    """Whether anybody sees the mistake, all looking."""
    return any(True for _ in seen_by(fault, ANYBODY))


def all_who_see(fault: Fault) -> set[str]:
    """Every detector that sees the mistake in some schedule."""
    found: set[str] = set()
    for detector in DETECTORS:
        for who in seen_by(fault, detector):
            found.add(who)
            if detector in found:
                break
    return found


@contextmanager
def timed() -> Iterator[Callable[[], float]]:
    began = time.monotonic()
    yield lambda: time.monotonic() - began


def main() -> int:
    torch.set_num_threads(1)
    num_seen, counts = 0, Counter[str]()
    with timed() as elapsed:
        assert not all_who_see(NONE), "something is seen where nothing is wrong"
        print(f"{'one thing wrong':62} " + " ".join(f"{name:9}" for name in DETECTORS))
        for fault in ALL:
            found = all_who_see(fault)
            num_seen += bool(found)
            counts.update(found)
            print(f"{fault.name:62} " + " ".join(f"{'seen' if name in found else '-':9}" for name in DETECTORS))
        print(f"{'seen by':62} " + " ".join(f"{counts[name]:<9}" for name in DETECTORS))
        print(f"{num_seen} of {len(ALL)} seen ({100 * num_seen / len(ALL):.0f}%), {elapsed():.0f} s")
    return 0 if num_seen == len(ALL) else 1


if __name__ == "__main__":
    sys.exit(main())
