"""A device of plain arrays, a model whose next token depends on every earlier one, and a driver for the scheduler.

The fake's KV cache holds the tokens themselves. A sample reads a row's whole history back through its block table, so
that a wrong row, block, position or order shows as a wrong token. The first group of layers must see everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gapless.core.guide import mask_words
from gapless.core.limits import Limits
from gapless.core.outcome import Commit, Finished, TokenLogprob, completion_logprobs, prompt_logprobs
from gapless.core.params import SamplingParams
from gapless.core.plan import NO_MORE, Plan
from gapless.core.request import IntArray, Request, int_array
from gapless.core.scheduler import Scheduler
from gapless.errors import StepFailed
from gapless.pipeline.executor import FillMasks, Ticket
from gapless.pipeline.loop import settle
from gapless.runner.calls import Call
from gapless.runner.fill import Filled

VOCAB = 53


def next_token(history: Sequence[int], vocab: int = VOCAB) -> int:
    """The model: a hash of all tokens and their order."""
    value = 7
    for token in history:
        value = (value * 1_000_003 + int(token) + 11) % (2**61 - 1)
    return (value * 0x9E3779B97F4A7C15 % 2**64 >> 33) % vocab


def next_allowed(history: Sequence[int], allowed: npt.NDArray[np.bool_]) -> int:
    """The first token from the model's own choice on that may come."""
    return int(np.argmax(np.roll(allowed, -next_token(history))) + next_token(history)) % VOCAB


def next_logprob(history: Sequence[int], token: int, num_top: int) -> TokenLogprob:
    """How likely the token is after the history, as far as the model cares; every number depends on all of it."""
    first = next_token([*history, token, 1], 1000)
    top = tuple((next_token([*history, i, 2]), -next_token([*history, i, 3], 64) / 8) for i in range(num_top))
    return TokenLogprob(token, -first / 8, first % VOCAB + 1, top)


def pack_logprob(found: TokenLogprob) -> list[int]:
    """As a step gives it back."""
    floats = np.array([found.logprob, *(logprob for _, logprob in found.top)], np.float32).view(np.int32).tolist()
    return [floats[0], found.rank, *(token for token, _ in found.top), *floats[1:]]


class FakeExecutor:
    """Runs plans on arrays at launch, in launch order, as one compute stream would; `failures` are steps that raise."""

    def __init__(self, limits: Limits, failures: Container[int] = ()) -> None:
        self._failures = failures
        self._size = limits.block_size
        self._kv = np.full((limits.num_blocks + 1, limits.block_size), -1)  # the last has no owner
        self._windows = limits.windows
        self._tables = np.full((limits.num_groups, limits.num_rows, limits.max_blocks), -1)
        self._length = np.zeros(limits.num_rows, int)
        self._last = np.full(limits.num_rows, -1)
        self._masks = np.ones((limits.num_rows, VOCAB), bool)
        self._results: dict[int, IntArray | StepFailed] = {}
        self.launched: list[Plan] = []
        self.in_flight: list[int] = []  # how many steps were, after each launch

    def launch(self, plan: Plan) -> Ticket:
        self.launched.append(plan)
        self.in_flight.append(len(self._results) + 1)
        if plan.is_split:
            return Ticket(plan, None, open_half=Filled(plan, 0))
        self._start(plan)
        return Ticket(plan, None)

    def complete(self, ticket: Ticket, fill_masks: FillMasks, calls: tuple[Call, ...] = ()) -> Ticket:
        """All of a split step runs here: nothing comes between its halves on the stream."""
        assert ticket.open_half is not None
        assert ticket.plan is self.launched[-1], "something was launched behind an open step"
        num_rows = len(self._masks)
        rows, masks = np.zeros(num_rows, np.int64), np.zeros((num_rows, mask_words(VOCAB)), np.int32)
        self._masks[ticket.plan.seat_rows] = True
        for row, mask in zip(rows, masks[: fill_masks(ticket.plan, rows, masks)], strict=False):
            self._masks[row] = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
        self._start(ticket.plan)
        return Ticket(ticket.plan, None)

    def _start(self, plan: Plan) -> None:
        try:
            self._results[plan.step] = self._run(plan)
        except IndexError as error:  # follows a step that failed, and finds no blocks
            self._results[plan.step] = StepFailed(str(error))

    def collect(self, ticket: Ticket) -> IntArray:
        assert ticket.open_half is None
        result = self._results.pop(ticket.plan.step)
        if isinstance(result, StepFailed):
            raise result
        return result

    def _run(self, plan: Plan) -> IntArray | StepFailed:
        if plan.step in self._failures:
            return StepFailed(f"step {plan.step}")
        if not plan.is_split:
            self._masks[plan.seat_rows] = True
        for row, index, *blocks in plan.new_blocks.tolist():
            self._tables[:, row, index] = blocks
        decoded = [self._decode(row, width, plan.step) for row, width in decode_segments(plan)]
        for chunk in plan.chunks:
            self._feed(chunk.row, chunk.start, chunk.tokens)
        rows = plan.sample_rows[plan.num_decodes :].tolist()
        tokens = int_array([*(token for tokens in decoded for token in tokens), *map(self._sample, rows)])
        return int_array([*tokens.tolist(), *self._scores(plan, tokens)]) if plan.num_scores else tokens

    def _decode(self, row: int, width: int, step: int) -> list[int]:
        """Feed what the row holds; of a draft, keep some of the right tokens, and leave junk behind the last."""
        count = 1 + (step * 7 + row * 3) % width
        found = []
        for _ in range(count):
            self._feed(row, self._length[row], [self._last[row]])
            found.append(self._sample(row))
        kept = self._length[row]
        self._feed(row, kept, [-1] * (width - count))
        self._length[row] = kept
        return found + [NO_MORE] * (width - count)

    def _sample(self, row: int) -> int:
        self._last[row] = next_allowed(self._history(row), self._masks[row])
        return int(self._last[row])

    def _scores(self, plan: Plan, tokens: IntArray) -> list[int]:
        rows = plan.sample_rows
        places = [(self._history(rows[i]), int(tokens[i])) for i in plan.score_samples.tolist()]
        for chunk in plan.chunks:
            history = self._history(chunk.row)
            targets = enumerate(chunk.targets.tolist(), chunk.scored_from + 1)
            places += [(history[:length], target) for length, target in targets]
        return [n for place in places for n in pack_logprob(next_logprob(*place, plan.num_top))]

    def close(self) -> None:
        pass

    def _feed(self, row: int, start: int, tokens: Sequence[int]) -> None:
        for position, token in enumerate(tokens, start):
            for table in self._tables:
                self._kv[table[row, position // self._size], position % self._size] = token
        self._length[row] = start + len(tokens)

    def _history(self, row: int) -> list[int]:
        """As the first group has it; where a group with a window has other tokens, those count."""
        length = self._length[row]
        found = self._read(0, row, length)
        for group, window in enumerate(self._windows):
            if window is not None:
                seen = min(window, length)
                found[length - seen :] = self._read(group, row, length)[length - seen :]
        return found

    def _read(self, group: int, row: int, length: int) -> list[int]:
        blocks = self._tables[group, row, : -(-length // self._size)]
        return self._kv[blocks].reshape(-1)[:length].tolist()


def decode_segments(plan: Plan) -> list[tuple[int, int]]:
    """Decode rows and their widths."""
    return list(zip(plan.decode_rows.tolist(), plan.sample_widths.tolist()[: plan.num_decodes], strict=True))


def make_limits(**changes: int | bool) -> Limits:
    values = {"num_rows": 4, "num_blocks": 64, "block_size": 4, "max_batch_tokens": 32, "max_model_len": 64}
    return Limits(**values | changes)  # type: ignore[arg-type]


def make_request(
    id: str, prompt: Sequence[int], limits: Limits, *, max_tokens: int = 8, streams: bool = False, **params: object
) -> Request:
    """A request as the engine makes it. `stop_token_ids` are all its stop tokens."""
    sampling = SamplingParams.from_dict({"max_tokens": max_tokens, "temperature": 0, **params})
    limit = min(len(prompt) + max_tokens, limits.max_model_len)
    return Request(id, int_array(prompt), sampling, 0, sampling.stop_token_ids, limit, streams)


def truth(request: Request) -> tuple[list[int], str]:
    """What the fake model says to a request, and why it ends."""
    tokens: list[int] = request.prompt.tolist()
    least = request.num_prompt + request.params.min_tokens
    while len(tokens) < request.limit:
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_ids and len(tokens) > least:
            return tokens[request.num_prompt :], "stop"
    return tokens[request.num_prompt :], "length"


def check_logprobs(request: Request) -> None:
    """Assert that a request that ended has the log-probabilities it asked for, and no others."""
    tokens, wanted = request.tokens.tolist(), request.params
    places = range(request.num_prompt, len(tokens))
    found = completion_logprobs(request, len(places))
    if wanted.logprobs is None:
        assert (found, request.scores) == (None, [])
    else:
        assert found == tuple(next_logprob(tokens[:i], tokens[i], wanted.logprobs) for i in places)
    of_prompt = prompt_logprobs(request)
    if wanted.prompt_logprobs is None:
        assert (of_prompt, request.prompt_scores) == (None, [])
        return
    truth = [next_logprob(tokens[:i], tokens[i], wanted.prompt_logprobs) for i in range(1, request.num_prompt)]
    known = request.num_prompt_scores
    assert of_prompt == (None, *truth[:known], *[None] * (len(truth) - known))
    assert known == len(truth) or not places, "a sample came before the prompt's log-probabilities"


@dataclass
class Run:
    """What came of a workload."""

    scheduler: Scheduler
    executor: FakeExecutor
    finished: dict[str, Finished] = field(default_factory=dict)
    streamed: dict[str, list[int]] = field(default_factory=dict)
    streamed_logprobs: dict[str, list[TokenLogprob | None]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # ids as they ended
    num_turns: int = 0

    def tokens(self, id: str) -> list[int]:
        request = self.finished[id].request
        return request.tokens[request.num_prompt :].tolist()

    def take(self, *finished: Finished | None) -> None:
        for item in finished:
            if item is not None:
                assert item.request.id not in self.finished, "ended twice"
                self.finished[item.request.id] = item
                self.order.append(item.request.id)

    def commit(self, commit: Commit) -> None:
        for item in commit.progress:
            self.streamed.setdefault(item.request.id, []).append(item.token)
            self.streamed_logprobs.setdefault(item.request.id, []).append(item.logprob)
        self.take(*commit.finished)


def drive(
    limits: Limits,
    arrivals: Mapping[int, Sequence[Request]],
    *,
    depth: int = 1,
    aborts: Mapping[int, Sequence[str]] | None = None,
    failures: Collection[int] = (),
    holds: Mapping[int, Sequence[tuple[str, int]]] | None = None,
) -> Run:
    """Run a workload: in turn n requests arrive, are aborted and held, a step is planned, and one may be settled."""
    run = Run(Scheduler(limits), FakeExecutor(limits, failures))
    held = sum(first + count for first, pairs in (holds or {}).items() for _, count in pairs)
    bound = turn_bound(arrivals, aborts or {}, depth) * (1 + len(failures)) + held
    in_flight: deque[Ticket] = deque()
    while run.num_turns <= max(arrivals) or run.scheduler.has_requests or in_flight:
        assert run.num_turns <= bound, f"more than {bound} turns: somebody starves"
        for request in arrivals.get(run.num_turns, ()):
            run.scheduler.add(request)
        for id in (aborts or {}).get(run.num_turns, ()):
            run.take(run.scheduler.abort(id))
        hold_and_release(run.scheduler, holds or {}, run.num_turns)
        run.num_turns += 1
        turn(run, in_flight, depth)
    return run


def hold_and_release(scheduler: Scheduler, holds: Mapping[int, Sequence[tuple[str, int]]], number: int) -> None:
    """In turn n, each of `holds[n]` is held for so many turns."""
    for first, pairs in holds.items():
        for id, count in pairs:
            if number == first:
                scheduler.hold(id, "for a test")
            if number == first + count:
                scheduler.release(id)


def turn(run: Run, in_flight: deque[Ticket], depth: int) -> None:
    """One turn of the loop, with every invariant checked on the way."""
    scheduler = run.scheduler
    plan = scheduler.schedule()
    scheduler.check()
    if plan is not None:
        check_plan(plan, scheduler.limits)
        in_flight.append(run.executor.launch(plan))
    if in_flight and (plan is None or len(in_flight) >= depth):
        run.commit(settle(scheduler, run.executor, in_flight.popleft()))
        scheduler.check()


def check_plan(plan: Plan, limits: Limits) -> None:
    """Assert that a plan keeps to the limits and names each row once."""
    rows = plan.decode_rows.tolist() + [chunk.row for chunk in plan.chunks]
    assert 0 < plan.num_tokens <= limits.max_batch_tokens
    assert len(plan.new_blocks) <= limits.max_new_blocks
    assert len(set(rows)) == len(rows)
    assert set(plan.seat_rows.tolist()) <= set(rows)
    assert set(plan.new_blocks[:, 0].tolist()) <= set(rows), "a block for a row that is not in the step"
    assert plan.sample_rows.tolist() == plan.decode_rows.tolist() + [c.row for c in plan.chunks if c.samples]
    assert len({(row, index) for row, index, *_ in plan.new_blocks.tolist()}) == len(plan.new_blocks)
    assert plan.num_scores <= plan.num_tokens
    for chunk in plan.chunks:
        scored_to = chunk.scored_from + len(chunk.targets)
        assert len(chunk.targets) == 0 or chunk.start <= chunk.scored_from < scored_to <= chunk.length


def turn_bound(arrivals: Mapping[int, Sequence[Request]], aborts: Mapping[int, Sequence[str]], depth: int) -> int:
    """The oldest request advances by a token at least in each turn, and waits for what is in flight once."""
    work = sum(request.limit + depth + 2 for batch in arrivals.values() for request in batch)
    return max([*arrivals, *aborts]) + depth + work


def check_empty(scheduler: Scheduler) -> None:
    """Assert that nothing is left of any request."""
    scheduler.check()
    assert not scheduler.has_requests
    assert scheduler.num_waiting == scheduler.num_running == 0
    assert scheduler.rows.num_free == scheduler.limits.num_rows
    assert scheduler.pool.num_used == 0
    assert scheduler.pool.num_available == scheduler.limits.num_blocks
