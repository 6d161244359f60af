"""Guides at work: they learn what became known, and fill the masks of a step's rows.

A guide hears of facts alone, in order and each once, so that it never has to step back. A request whose guide says
that it is over ends there; one whose guide raises ends with that error, and nobody else is concerned. Belongs to the
loop's thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from gapless.core.guide import Guide, allow_only
from gapless.core.outcome import Commit, Finished
from gapless.core.plan import Plan
from gapless.core.request import IntArray, LongArray, Request
from gapless.core.scheduler import Scheduler
from gapless.errors import ControlFailed, GaplessError, InvalidRequest
from gapless.guides.masks import SLOW_S, Filling, advance_together, fill_masks, forced_runs

log = logging.getLogger(__name__)
MAX_SLOW = 3  # masks of one request that take too long
NUM_TIMED = 64  # masks that a suspect has to fill alone, and steps whose masks are filled in small groups
SMALL_GROUP = 16  # all of which are suspects if it took too long


class Masks:
    """The guides of the scheduler's rows."""

    def __init__(self, scheduler: Scheduler, ledger: Counter[str] | None = None) -> None:
        self._scheduler = scheduler
        self._ledger = Counter[str]() if ledger is None else ledger
        self._ended: list[Finished] = []
        self._runs: list[tuple[Request, Sequence[int]]] = []  # of the masks that were filled last
        self._num_wary = 0  # steps to come whose masks are filled in small groups, because some took too long

    def learn(self, plan: Plan, commit: Commit) -> Commit:
        """A plan was committed: tell the guides of its rows, and add the requests that are over thereby."""
        finished = tuple([self._judge(item) if item.reason == "length" else item for item in commit.finished])
        for request, num_known in self._advance_together(self._guided(plan)):
            self._advance(request, num_known)
        return Commit(commit.num_tokens, commit.progress, finished + self.take_ended())

    def fill(self, plan: Plan, rows: LongArray, masks: IntArray) -> int:
        """Write the masks of the plan's rows, and whose they are; how many. A row whose owner has left gets none.

        rows: [n], masks: [n, mask_words], for at least as many as the plan wants.
        """
        requests = [
            request
            for request, num_known in self._guided(plan)
            if len(request.prompt) + request.num_guided >= num_known or self._advance(request, num_known)
        ]
        rows[: len(requests)] = [request.row for request in requests]
        guides = [request.guide for request in requests if request.guide is not None]
        errors = self._fill_in_time(requests, guides, masks)
        runs = forced_runs(guides, errors)
        for index, error in errors.items():  # such a row has left; what its mask says is nobody's concern
            self._end(requests[index], "error", _failure(requests[index], error))
        self._force(requests, runs, masks)
        return len(requests)

    def _fill_in_time(
        self, requests: Sequence[Request], guides: Sequence[Guide], masks: IntArray
    ) -> dict[int, Exception]:
        """Write the masks; the errors of those that have none, or were too slow too often, by index."""
        timed = [index for index, request in enumerate(requests) if request.num_timed_masks]
        found = fill_masks(guides, masks, timed, SMALL_GROUP if self._num_wary else None)
        self._num_wary = NUM_TIMED if found.suspects else max(self._num_wary - 1, 0)
        for index in timed:
            requests[index].num_timed_masks -= 1
        for index in (*found.slow, *(found.suspects if len(found.suspects) <= SMALL_GROUP else ())):
            requests[index].num_timed_masks = NUM_TIMED
        return found.errors | self._too_slow(requests, found)

    def _too_slow(self, requests: Sequence[Request], found: Filling) -> dict[int, Exception]:
        """Everybody in the step waits for its slowest mask, so a request may have only a few slow ones."""
        errors: dict[int, Exception] = {}
        for index, seconds in found.slow.items():
            request = requests[index]
            request.num_slow_masks += 1
            self._ledger["slow masks"] += 1
            if request.num_slow_masks >= MAX_SLOW and index not in found.errors:
                errors[index] = InvalidRequest(
                    f"structured is too slow to follow: for {MAX_SLOW} tokens it took more than {SLOW_S:g} s to find "
                    f"what may come next, {seconds:.2f} s for the last one; simplify the grammar",
                    "structured",
                )
        return errors

    def _force(self, requests: list[Request], runs: Mapping[int, Sequence[int]], masks: IntArray) -> None:
        """Where one text alone can come, allow its next token as the tokenizer writes it, and no part of that token."""
        self._runs = []
        for index, found in runs.items():
            request = requests[index]
            run = found[: _num_before_early_stop(request, found)]
            if run:
                allow_only(run[0], masks[index])
            if run and request.can_be_forced and request.row >= 0:
                self._runs.append((request, run))

    def settle(self) -> Commit:
        """What followed from the masks themselves: tokens that must come, and requests that ended."""
        commit = self._scheduler.force(self._runs)
        finished = tuple([self._judge(item) if item.reason == "length" else item for item in commit.finished])
        told = [request for request, _ in self._runs]
        while told := [request for request in told if request.row >= 0 and self._is_behind(request)]:
            self._advance_by_one(told)
        self._runs.clear()
        return Commit(commit.num_tokens, commit.progress, finished + self.take_ended())

    def take_ended(self) -> tuple[Finished, ...]:
        """The requests that ended since the last call: their guides are over, or have failed."""
        found = tuple(self._ended)
        self._ended.clear()
        return found

    def _guided(self, plan: Plan) -> list[tuple[Request, int]]:
        """The requests whose masks the plan wants, without those that have left since, and their known tokens."""
        table, rows = self._scheduler.rows, plan.sample_rows[plan.mask_samples].astype(np.int64)
        rows = rows[table.epoch[rows] == plan.sample_epochs[plan.mask_samples]]
        owners = [table.request[row] for row in rows.tolist()]
        pairs = zip(owners, table.num_tokens[rows].tolist(), strict=True)
        return [(request, num_known) for request, num_known in pairs if request is not None]

    def _advance_together(self, guided: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Tell all guides that are one token behind, at once. Returns the requests that are left."""
        is_behind = [len(request.prompt) + request.num_guided + 1 == num_known for request, num_known in guided]
        self._advance_by_one([request for (request, _), behind in zip(guided, is_behind, strict=True) if behind])
        return [pair for pair, behind in zip(guided, is_behind, strict=True) if not behind]

    def _is_behind(self, request: Request) -> bool:
        """Whether there are tokens that the guide has not heard of."""
        return len(request.prompt) + request.num_guided < int(self._scheduler.rows.num_tokens[request.row])

    def _advance_by_one(self, requests: list[Request]) -> None:
        """Tell each guide the next token that it has not heard of; end the requests that are over thereby."""
        rows = [request.row for request in requests]
        places = [len(request.prompt) + request.num_guided for request in requests]
        tokens = self._scheduler.rows.tokens[rows, places].tolist()
        errors = advance_together([request.guide for request in requests if request.guide is not None], tokens)
        for request in requests:
            request.num_guided += 1
        for index, error in errors.items():
            self._end(requests[index], "error", _failure(requests[index], error))
        for index, request in enumerate(requests):
            if request.guide is not None and request.guide.is_over and index not in errors:
                self._end(request, "stop")

    def _judge(self, finished: Finished) -> Finished:
        """A request that has reached its limit: its last token may have been the one that makes it complete."""
        request = finished.request
        if request.guide is None or not request.guide.waits:
            return finished
        try:
            is_over = self._tell(request, request.tokens)
        except Exception as error:
            return Finished(request, "error", _failure(request, error))
        return Finished(request, "stop") if is_over else finished

    def _advance(self, request: Request, num_known: int) -> bool:
        """Tell the guide what it has not heard yet, mostly nothing; False if the request is over thereby."""
        if len(request.prompt) + request.num_guided >= num_known:
            return True
        try:
            is_over = self._tell(request, self._scheduler.rows.tokens[request.row, :num_known])
        except Exception as error:
            self._end(request, "error", _failure(request, error))
            return False
        if is_over:
            self._end(request, "stop")
        return not is_over

    @staticmethod
    def _tell(request: Request, known: IntArray) -> bool:
        """Of the known tokens, those that the guide has not heard of; whether it is over."""
        assert request.guide is not None
        news = known[request.num_prompt + request.num_guided :]
        if len(news):
            request.num_guided += len(news)
            request.guide.advance(news.copy())  # its own, should it keep them
        return request.guide.is_over

    def _end(self, request: Request, reason: str, error: GaplessError | None = None) -> None:
        finished = self._scheduler.abort(request.id, reason, error)
        assert finished is not None
        self._ended.append(finished)


def _num_before_early_stop(request: Request, run: Sequence[int]) -> int:
    """Tokens of a run before one that would end the request too early: the sampler does not let that one come."""
    num_early = max(0, request.params.min_tokens - request.num_guided)
    return next((place for place, token in enumerate(run[:num_early]) if token in request.stop_ids), len(run))


def _failure(request: Request, error: Exception) -> GaplessError:
    """What to tell the client: a guide may say itself why it cannot go on."""
    if isinstance(error, GaplessError):
        return error
    log.info("the guide of request %s raised", request.id, exc_info=error)
    found = ControlFailed(f"the guide failed after {request.num_guided} tokens: {type(error).__name__}: {error}")
    found.__cause__ = error
    return found
