"""Every request that is not over, what came of it so far, and who may run after a crash.

Owns flights. Knows no process and no socket: it is told what happened and says whom to send to the engine next.

    held --due--> sent --started--> running --over--> gone
      ^------------- crash ------------'

A crash sends everybody back to be held. Whoever was running in two crashes with no token in between is a suspect.
Suspects run one at a time, while all others that have not proved themselves wait; a new token clears a suspect. One
that takes the engine down again is refused, alone. A SIGKILL may be the operator's or the memory's and not due to any
request: then it takes more of them before a request is refused.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from gapless.core.outcome import TokenLogprob
from gapless.core.params import SamplingParams
from gapless.server.messages import Over

MAX_CRASHES = 2  # while a request ran, with no token between them: then it is a suspect
MAX_KILLS = 4  # the same, all from outside: then a suspect that ran alone is refused


@dataclass(eq=False, slots=True)
class Flight:
    """A request on its way: what it takes to start it again, and what came so far. The roster is its only writer."""

    id: int
    prompt: Sequence[int]
    params: SamplingParams  # with its seed
    changed: asyncio.Event  # set when anything below has changed; the reader clears it
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one for each of `tokens`, if asked for
    prompt_logprobs: list[TokenLogprob | None] | None = None  # with the first token, if asked for
    num_cached: int = 0
    over: Over | None = None
    sent: bool = False
    started: bool = False
    num_crashes: int = 0  # while it ran, with no token between them
    num_tokens_at_crash: int = -1
    arrived_s: float = field(default_factory=time.monotonic)
    started_s: float | None = None  # the first time
    first_token_s: float | None = None
    over_s: float | None = None


class Roster:
    """The flights, in order of arrival."""

    def __init__(self) -> None:
        self._flights: dict[int, Flight] = {}
        self._held: dict[int, Flight] = {}
        self._suspects: deque[Flight] = deque()
        self._on_trial: Flight | None = None

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._flights.values()))

    @property
    def in_quarantine(self) -> bool:
        return self._on_trial is not None or bool(self._suspects)

    def add(self, flight: Flight) -> None:
        self._flights[flight.id] = self._held[flight.id] = flight

    def due(self) -> list[Flight]:
        """Whom to send now. They count as sent."""
        if self._on_trial is not None:
            return []
        while self._suspects:
            suspect = self._suspects.popleft()
            if suspect.id in self._held:
                self._on_trial = suspect
                return self._send([suspect])
        return self._send(list(self._held.values()))

    def check(self) -> None:
        """Assert that nobody is lost or in two places. For tests."""
        assert self._held.keys() == {flight.id for flight in self._flights.values() if not flight.sent}
        assert all(flight.sent for flight in self._flights.values() if flight.started)
        assert self._on_trial is None or self._on_trial.sent

    def _send(self, flights: list[Flight]) -> list[Flight]:
        for flight in flights:
            flight.sent = True
            del self._held[flight.id]
        return flights

    # -- what happened -----------------------------------------------------------------------------------------------

    def start(self, id: int) -> None:
        flight = self._flights.get(id)
        if flight is not None and flight.sent:
            flight.started = True
            if flight.started_s is None:
                flight.started_s = time.monotonic()

    def take_prompt_logprobs(self, id: int, scores: list[TokenLogprob | None]) -> None:
        if (flight := self._flights.get(id)) is not None:
            flight.prompt_logprobs = scores

    def take_token(self, id: int, token: int, logprob: TokenLogprob | None = None) -> Flight | None:
        """None for a flight that left already."""
        flight = self._flights.get(id)
        if flight is None:
            return None
        if flight.first_token_s is None:
            flight.first_token_s = time.monotonic()
        flight.tokens.append(token)
        if logprob is not None:
            flight.logprobs.append(logprob)
        flight.changed.set()
        if flight is self._on_trial:
            self._on_trial = None
        return flight

    def end(self, over: Over) -> Flight | None:
        """A flight is over, for whatever reason. None if it was already."""
        flight = self._flights.pop(over.id, None)
        if flight is None:
            return None
        self._held.pop(over.id, None)
        flight.over = over
        flight.over_s = time.monotonic()
        flight.num_cached = flight.num_cached or over.num_cached
        flight.changed.set()
        if flight is self._on_trial:
            self._on_trial = None
        return flight

    def crash(self, blamed: Collection[int], *, from_outside: bool = False) -> list[Flight]:
        """The engine is gone. Everybody is held again; returns whom to refuse.

        `blamed` are those of the step that failed; empty when the engine could not tell.
        """
        running = [flight for flight in self._flights.values() if flight.started]
        suspects = [flight for flight in running if flight.id in blamed] or running
        if self._on_trial is not None and self._on_trial.sent:
            suspects = [self._on_trial]
        for flight in suspects:
            made_progress = len(flight.tokens) > flight.num_tokens_at_crash
            flight.num_crashes = 1 if made_progress else flight.num_crashes + 1
            flight.num_tokens_at_crash = len(flight.tokens)
        repeated = [flight for flight in suspects if flight.num_crashes >= MAX_CRASHES]
        enough = MAX_KILLS if from_outside else MAX_CRASHES
        refused = [flight for flight in repeated if len(suspects) == 1 and flight.num_crashes >= enough]
        self._suspects.extend(flight for flight in repeated if flight not in refused)
        self._on_trial = None
        for flight in self._flights.values():
            flight.sent = flight.started = False
        unlucky_first = sorted(self._flights.values(), key=lambda flight: -flight.num_crashes)
        self._held = {flight.id: flight for flight in unlucky_first}
        return refused
