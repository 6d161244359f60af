"""From flights to text: the choices of one HTTP request, as their tokens come in.

A choice's transcript is not touched by a crash of the engine. New tokens of a choice whose reader is slow gather in
its flight and come out as one piece: nothing else grows. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from gapless.core.choices import best, is_ranked, mean_logprob, num_candidates
from gapless.core.params import SamplingParams
from gapless.server.engines import Engines
from gapless.server.errors import ApiError, shutting_down, timed_out
from gapless.server.messages import Over, Scores, unpack_scores
from gapless.server.roster import Flight
from gapless.text.transcript import Transcript


@dataclass(frozen=True, slots=True)
class Piece:
    """The news of one choice since its last piece. The last piece has a finish reason."""

    choice: Choice
    text: str
    tokens: Sequence[int]
    finish_reason: str | None
    told: range = range(0)  # which tokens of the choice to tell log-probabilities of: those whose text was shown


class Choice:
    """One continuation of one prompt."""

    def __init__(
        self, index: int, flight: Flight, transcript: Transcript, *, shows_tokens: bool = True, tells_all: bool = True
    ) -> None:
        self.index = index
        self.flight = flight
        self._transcript = transcript
        self._shows_tokens = shows_tokens  # False where no tokens were asked for, and the engine had to make one
        self._tells_all = tells_all  # log-probabilities of tokens that are no part of the text too
        self._num_seen = 0
        self._num_told = 0

    @property
    def finish_reason(self) -> str | None:
        return self._transcript.finish_reason

    @property
    def text(self) -> str:
        return self._transcript.text

    @property
    def tokens(self) -> Sequence[int]:
        return self._transcript.token_ids

    @property
    def told(self) -> range:
        """Tokens whose log-probabilities were told."""
        return range(self._num_told)

    @property
    def num_shown(self) -> int:
        """Characters of the text."""
        return self._transcript.num_shown

    @property
    def starts(self) -> Sequence[int]:
        """Where each token begins in the text."""
        return self._transcript.starts

    def scores(self, told: range) -> Sequence[Scores]:
        return self.flight.logprobs[told.start : told.stop]

    def mean_logprob(self) -> float:
        packed = self.scores(range(self.num_tokens))
        return mean_logprob(score for scores in packed for score in unpack_scores(scores))

    @property
    def num_tokens(self) -> int:
        return len(self._transcript.token_ids)

    def take(self) -> Piece | None:
        """The piece that is due, if any. Raises ApiError when the flight failed."""
        if self.finish_reason is not None:
            return None
        over = self.flight.over
        added = self._transcript.take(self._new_tokens(), self._reason(over))
        if self.finish_reason is None:
            if over is not None:
                raise _failure(over)
            if not added.token_ids:
                return None
        return Piece(self, added.text, added.token_ids, self.finish_reason, self._tell())

    def _new_tokens(self) -> Sequence[int]:
        new = self.flight.tokens[self._num_seen :]
        self._num_seen += len(new)
        return new if self._shows_tokens else ()

    def _reason(self, over: Over | None) -> str | None:
        """Why the flight ended, if it did and not by a failure."""
        if over is None or over.reason not in ("stop", "length"):
            return None
        return over.reason if self._shows_tokens else "length"

    def _tell(self) -> range:
        """Tokens to tell of now. The text of one that is left for later may yet turn out to be a stop string."""
        if self.flight.params.logprobs is None:
            return range(0)
        first, is_over = self._num_told, self.finish_reason is not None
        self._num_told = self.num_tokens if is_over and self._tells_all else self._transcript.num_in_text()
        return range(first, self._num_told)


class Generation:
    """The choices of one HTTP request."""

    def __init__(
        self,
        engines: Engines,
        choices: Sequence[Choice],
        changed: asyncio.Event,
        deadline_s: float,
        params: SamplingParams | None = None,
    ) -> None:
        self.choices = choices  # every candidate, prompt by prompt
        self._params = params or SamplingParams()  # how many candidates a prompt has, and how many are returned
        self._engines = engines
        self._changed = changed
        self._deadline_s = deadline_s  # by the event loop's clock

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Pieces as they come. Whoever stops reading ends the request; so does the deadline, read or not."""
        alarm = asyncio.get_running_loop().call_at(self._deadline_s, self._expire)
        try:
            while any(choice.finish_reason is None for choice in self.choices):
                await self._changed.wait()
                self._changed.clear()
                found = [piece for choice in self.choices if (piece := choice.take()) is not None]
                for piece in found:
                    if piece.finish_reason is not None:
                        self._engines.abort(piece.choice.flight, "stop")
                if found:
                    yield found
        finally:
            alarm.cancel()
            self.abort()

    def _expire(self) -> None:
        for choice in self.choices:
            self._engines.abort(choice.flight, "timeout")

    def abort(self) -> None:
        """End what still runs."""
        for choice in self.choices:
            self._engines.abort(choice.flight)

    async def finish(self) -> Sequence[Choice]:
        """Wait for all of it. The choices to return: of each prompt's candidates the best, if there are more."""
        async for _ in self.pieces():
            pass
        if not is_ranked(self._params):
            return self.choices
        scores: dict[Choice, float] = {}
        for choice in self.choices:
            scores[choice] = choice.mean_logprob()
            await asyncio.sleep(0)  # others have their turn
        size, found = num_candidates(self._params), list[Choice]()
        for start in range(0, len(self.choices), size):
            found += best(self.choices[start : start + size], self._params.n, scores.__getitem__)
        for index, choice in enumerate(found):
            choice.index = index
        return found


def _failure(over: Over) -> ApiError:
    """The error for a flight that did not end well."""
    error = over.error
    match over.reason:
        case "invalid":
            return ApiError(400, error or "the engine refused the request", param=over.param)
        case "refused":
            return ApiError(500, error or "the request was refused", code="engine_crash")
        case "timeout":
            return timed_out()
        case "abort":
            return shutting_down()
        case _:
            return ApiError(500, error or "the engine failed", code="engine_error")
