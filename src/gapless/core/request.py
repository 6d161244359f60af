"""A request, and the table of rows in which running requests keep the state that changes with every step.

The table is a structure of arrays, so a step over a thousand rows is a few numpy calls. Only the scheduler writes it:
`schedule` writes promises (`cursor`, `pending`), `commit` turns them into facts (`tokens`, `num_tokens`).

    tokens   t0 t1 t2 t3 t4 t5 | .  .          facts: num_tokens = 6
    cursor               ^ 5                   positions [0, 5) were handed to the device
    pending  0: nothing in flight              5 + 1 = num_tokens + pending: the next step feeds t5

A row gets a new epoch when it gains or loses an owner. A plan stores the epoch of each row it samples, so a late result
is recognized.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.core.baggage import Baggage, Owner, most_baggage, pack_baggage
from gapless.core.guide import Guide
from gapless.core.params import SamplingParams
from gapless.core.prefix_index import ROOT, Entry
from gapless.core.processor import LogitsProcessor
from gapless.core.row_fields import SEAT, need, write_seat
from gapless.core.windows import NO_WINDOWS, Windows, sliding
from gapless.errors import InvalidRequest

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
MIN_TOKENS = need("min_total")


@dataclass(eq=False, slots=True)
class Request:
    """A client's request. `tokens` is brought up to date when the request leaves its row."""

    id: str
    prompt: IntArray
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]  # end-of-sequence and stop tokens, already merged
    limit: int  # prompt and output together, in tokens
    streams: bool = False  # somebody wants each token as it comes
    width: int = 1  # tokens that a step may bring at most: more where a runner verifies drafts
    guide: Guide | None = None  # which tokens may come next; None: all
    num_guided: int = 0  # generated tokens that the guide has been told of
    num_slow_masks: int = 0  # that its guide took too long for
    num_timed_masks: int = 0  # still to be filled alone, because a step's masks took too long and its own may be why
    processors: tuple[LogitsProcessor, ...] = ()  # that change its logits
    arrival: int = 0
    tokens: IntArray = field(default_factory=lambda: np.empty(0, np.int32))  # all facts while it has no row
    row: int = -1
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    was_admitted: bool = False
    scores: list[bytes] = field(default_factory=list)  # of each generated token, if the request has logprobs
    prompt_scores: list[IntArray] = field(default_factory=list)  # [n, width] each: of prompt tokens 1, 2, ...

    def __post_init__(self) -> None:
        self.tokens = self.prompt

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def is_controlled(self) -> bool:
        """Whether something stands between the logits and the token besides parameters."""
        return self.guide is not None or bool(self.processors)

    @property
    def wants_scores(self) -> bool:
        return self.params.logprobs is not None or self.params.prompt_logprobs is not None

    @property
    def can_be_forced(self) -> bool:
        """Whether its tokens may become facts before they are sampled: nothing has to be known of each sample."""
        return not (self.wants_scores or self.params.has_penalties or self.processors)

    @property
    def most_baggage(self) -> int:
        """Numbers that it brings to a row at most, beside its seat."""
        params = self.params
        return most_baggage(len(self.tokens) if params.has_penalties else 0, len(params.logit_bias))

    @property
    def num_prompt_scores(self) -> int:
        """Positions whose logits have been turned into log-probabilities of the prompt's next token."""
        return sum(len(scores) for scores in self.prompt_scores)

    @property
    def lacks_prompt_scores(self) -> bool:
        """Whether some requested log-probabilities of the prompt are still missing."""
        return self.params.prompt_logprobs is not None and self.num_prompt_scores < self.num_prompt - 1

    def resume_after(self, generated: IntArray) -> None:
        """Before submission: continue after tokens sampled elsewhere, as a preempted request does after its own."""
        if len(self.prompt) + len(generated) >= self.limit:
            raise InvalidRequest(f"{len(generated)} generated tokens leave nothing to generate, limit {self.limit}")
        if self.params.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs come before the first generated token; ask no more for them")
        self.tokens = int_array(np.concatenate((self.prompt, generated)))
        if self.params.logprobs is not None:
            self.scores = [b""] * len(generated)  # the scores come with the tokens


class RowTable:
    """The rows. Arrays are indexed by row; the module's docstring explains them."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, windows: Windows = NO_WINDOWS) -> None:
        self.num_rows = num_rows
        self.max_blocks = -(-max_model_len // block_size)
        self.tokens = np.zeros((num_rows, max_model_len), np.int32)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.cursor = np.zeros(num_rows, np.int64)
        self.pending = np.zeros(num_rows, np.int64)
        self.foreseen = np.zeros(num_rows, np.int64)  # samples in flight whose tokens are facts already
        self.num_foreseen = 0  # of all rows
        self.limit = np.zeros(num_rows, np.int64)
        self.ceiling = np.zeros(num_rows, np.int64)  # promises stay below it: the limit, or 0 for a row that is held
        self.epoch = np.zeros(num_rows, np.int64)
        self.decoding = np.zeros(num_rows, np.bool_)  # the next input token lies, or will lie, in the device's row
        self.arrival = np.full(num_rows, -1, np.int64)  # -1: nobody sits here
        self.streams = np.zeros(num_rows, np.bool_)
        self.width = np.ones(num_rows, np.int64)  # samples that a step may bring at most
        self.num_wide = 0  # rows whose width is more than 1
        self.seats = np.zeros(num_rows, SEAT)
        self.min_total = self.seats["min_total"]  # a stop token counts from this many tokens on
        self.stop_ids = self.seats["stop_ids"]
        self.most_stop_ids = 0  # of any request so far; those behind it are no tokens
        self.guided = np.zeros(num_rows, np.bool_)  # the next sample of the row comes with a new mask
        self.waits = np.zeros(num_rows, np.bool_)  # and so do all others: the mask follows from the sample before
        self.processed = np.zeros(num_rows, np.bool_)  # the row has logits processors
        self.follows = np.zeros(num_rows, np.bool_)  # its mask or a processor must know the sample before
        self.num_controlled = 0  # rows with a guide or a processor
        self.needs = np.zeros(num_rows, np.int64)  # bits of row_fields.need
        self.num_logprobs = np.full(num_rows, -1, np.int64)  # likeliest tokens requested with each sample; -1: none
        self.blocks = np.zeros((num_rows, self.max_blocks, len(windows)), np.int32)  # a table for each group of layers
        self.num_blocks = np.zeros(num_rows, np.int64)  # entries of each of its tables
        # of each window: the first entry that groups with it hold; those before were given back
        self.first_blocks = np.zeros((num_rows, len(list(sliding(windows)))), np.int64)
        self.prefix_entry: list[Entry] = [ROOT] * num_rows  # of the last registered block
        self.num_registered: list[int] = [0] * num_rows  # blocks registered so far
        self.request: list[Request | None] = [None] * num_rows
        self.num_scoring = 0  # requests with log-probabilities of any kind
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def seat(self, request: Request) -> int:
        """Give the request a row and write its facts there."""
        row = self._free.pop()
        count = len(request.tokens)
        params = request.params
        self.tokens[row, :count] = request.tokens
        self.num_tokens[row] = count
        self.cursor[row] = self.pending[row] = self.num_blocks[row] = self.foreseen[row] = 0
        self.limit[row] = self.ceiling[row] = request.limit
        self.epoch[row] += 1
        self.decoding[row] = False
        self.arrival[row] = request.arrival
        self.streams[row] = request.streams
        self.width[row] = 1 if request.wants_scores or request.is_controlled else request.width
        self.guided[row] = request.guide is not None
        self.waits[row] = request.guide is not None and request.guide.waits
        self.processed[row] = bool(request.processors)
        self.follows[row] = self.waits[row] or any(processor.needs_newest for processor in request.processors)
        self.num_controlled += request.is_controlled
        self.num_wide += bool(self.width[row] > 1)
        self.needs[row] = write_seat(self.seats, row, request)
        self.most_stop_ids = max(self.most_stop_ids, len(request.stop_ids))
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.num_registered[row] = 0
        self.prefix_entry[row] = ROOT
        self.request[row] = request
        self.num_scoring += request.wants_scores
        request.row = row
        return row

    def next_position(self, row: int) -> int:
        """No step to come feeds the row a token before this position, whatever those in flight bring."""
        return min(self.cursor.item(row), self.num_tokens.item(row) - 1)

    def seat_words(self, rows: list[int]) -> IntArray:
        """The seats of these rows [len(rows), SEAT_WORDS], as a plan carries them."""
        return self.seats[rows].view(np.int32).reshape(len(rows), -1)

    def baggage(self, rows: list[int]) -> Baggage:
        """What the owners of these rows bring beside their seats."""
        needs = self.needs[rows].tolist()
        return pack_baggage([self._owner(row, need_) for row, need_ in zip(rows, needs, strict=True) if need_])

    def _owner(self, row: int, needs: int) -> Owner:
        request = self.request[row]
        assert request is not None
        known = self.tokens[row, : self.num_tokens[row]]
        return Owner(row, needs, known, request.num_prompt, request.params.logit_bias)

    def needs_of(self, rows: LongArray) -> int:
        """Fields that any of these rows needs. A minimum length that is sure to be reached is no need any more."""
        needs = int(np.bitwise_or.reduce(self.needs[rows]))
        if needs & MIN_TOKENS:
            sure = self.num_tokens[rows] + (self.pending[rows] if self.num_wide == 0 else 1)
            needs -= 0 if (sure < self.min_total[rows]).any() else MIN_TOKENS
        return needs

    def masks_due(self, rows: LongArray) -> tuple[IntArray, bool]:
        """Which of these rows, each just promised a sample, get a mask before it. A mask that never changes stays.

        Also whether that mask, or a processor of the row, must know a sample that is still a promise.
        """
        due = np.flatnonzero(self.guided[rows])
        guided = rows[due]
        self.guided[guided] = self.waits[guided]
        return due.astype(np.int32), bool((self.follows[rows] & (self.pending[rows] > 1)).any())

    def processed_among(self, rows: LongArray) -> IntArray:
        """Which of these rows have logits processors."""
        return np.flatnonzero(self.processed[rows]).astype(np.int32)

    def unseat(self, request: Request) -> None:
        """Copy the facts back into the request and free its row; results still in flight for it are now overruns."""
        row = request.row
        request.tokens = self.tokens[row, : self.num_tokens[row]].copy()
        self.epoch[row] += 1
        self.num_foreseen -= int(self.foreseen[row])
        self.decoding[row] = False
        self.arrival[row] = -1
        self.request[row] = None
        self.num_scoring -= request.wants_scores
        self.num_controlled -= request.is_controlled
        self.guided[row] = self.processed[row] = self.follows[row] = False
        self.num_wide -= bool(self.width[row] > 1)
        self._free.append(row)
        request.row = -1

    def check(self) -> None:
        """Assert the invariants. For tests and the checking mode."""
        assert self.num_controlled == sum(request.is_controlled for request in self.request if request is not None)
        assert self.num_scoring == sum(request.wants_scores for request in self.request if request is not None)
        assert self.num_foreseen == sum(self.foreseen[row] for row in range(self.num_rows) if self.request[row])
        for row, request in enumerate(self.request):
            if request is None:
                assert row in self._free, f"row {row} leaked"
                assert not self.decoding[row]
                continue
            assert request.row == row
            assert row not in self._free
            known, cursor, pending = (int(a[row]) for a in (self.num_tokens, self.cursor, self.pending))
            assert 0 <= cursor <= known + pending <= self.limit[row]
            assert pending == 0 or self.decoding[row]
            assert not self.decoding[row] or cursor >= known + pending - 1
            assert self.foreseen[row] == 0 or request.can_be_forced
            assert len(request.scores) == (known - request.num_prompt if self.num_logprobs[row] >= 0 else 0)
            assert request.num_prompt_scores < request.num_prompt
            assert known == request.num_prompt or not request.lacks_prompt_scores


def int_array(values: Any) -> IntArray:
    """A read-only int32 array."""
    array = np.ascontiguousarray(values, np.int32)
    array.flags.writeable = False
    return array
