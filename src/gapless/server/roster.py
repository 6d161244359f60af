"""Every request that is not over, what came of it so far, and who may run after a crash.

Owns flights. Knows no process and no socket: it is told what happened and says whom to send to the engine next.

    held --due--> sent --started--> running --over--> gone
      ^------- crash, or called back --'

A crash sends everybody back to be held. Whoever ran in it is a suspect. Each suspect has the engine for itself for a
few tokens and is then called back, until all were heard; everybody else waits. So a second crash names exactly one, who
is refused; the others are cleared by it. The latest to arrive is tried first: who just came is the likeliest.

A SIGKILL from outside is most likely not due to any request: only who ran in two of them with no token in between is a
suspect then, and it takes more of them before a request is refused.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from array import array
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from gapless.core.params import SamplingParams, derive_seed
from gapless.server.messages import Over, Scores

MANY_KILLS = 2  # from outside, while a request ran, with no token between them: then it is a suspect too
MAX_KILLS = 4  # the same: then a suspect is refused


@dataclass(eq=False, slots=True)
class Flight:
    """A request on its way: what it takes to start it again, and what came so far. The roster is its only writer."""

    id: int
    prompt: Sequence[int]
    params: SamplingParams  # with its seed
    changed: asyncio.Event  # set when the reader should look at what is below; the reader clears it
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: list[Scores] = field(default_factory=list)  # one for each of `tokens`, if asked for
    prompt_logprobs: list[Scores] = field(default_factory=list)  # with the first token, if asked for
    num_cached: int | None = None  # of the prompt, when it was first let go of
    over: Over | None = None
    sent: bool = False
    started: bool = False
    called_back: bool = False  # and not yet there
    in_line: bool = False  # for its reader to be woken
    num_kills: int = 0  # of the engine from outside while it ran, with no token between them
    num_tokens_at_crash: int = -1
    arrived_s: float = field(default_factory=time.monotonic)
    started_s: float | None = None  # the first time
    first_token_s: float | None = None
    over_s: float | None = None


class FlightMaker:
    """Makes flights, each with its number and its seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_made = 0

    def make(self, prompt: Sequence[int], params: SamplingParams, changed: asyncio.Event) -> Flight:
        if params.seed is None:
            params = dataclasses.replace(params, seed=derive_seed(self._seed, self._num_made))
        flight = Flight(self._num_made, prompt, params, changed)
        self._num_made += 1
        return flight


class Roster:
    """The flights, in order of arrival."""

    def __init__(self, depth: int = 2) -> None:
        self._num_proofs = depth + 2  # tokens that clear a suspect: more than a crash can lose, so it is past its place
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

    def idle(self) -> list[Flight]:
        """Who waits to be sent and is no suspect."""
        suspects = {flight.id for flight in self._suspects}
        return [flight for flight in self._held.values() if flight.id not in suspects]

    def remove(self, flight: Flight) -> None:
        """It goes on elsewhere. What this engine still sends of it is dropped."""
        del self._flights[flight.id]
        self._held.pop(flight.id, None)
        if flight is self._on_trial:
            self._on_trial = None
        _land(flight)

    def due(self) -> list[Flight]:
        """Whom to send now. They count as sent."""
        if self._on_trial is not None:
            return []
        if (suspect := self._next_suspect()) is not None:
            self._on_trial = suspect
            return self._send([self._suspects.popleft()])
        return self._send(sorted(self._held.values(), key=lambda flight: flight.id))

    def due_back(self) -> Flight | None:
        """Whom to call back from the engine: a suspect that was heard, while others wait for their trial."""
        flight = self._on_trial
        if flight is None or flight.called_back or _progress(flight) < self._num_proofs:
            return None
        if self._next_suspect() is None:
            self._on_trial = None
            return None
        flight.called_back = True
        return flight

    def _next_suspect(self) -> Flight | None:
        """The first that is still there; it stays in its place."""
        while self._suspects and self._suspects[0].id not in self._held:
            self._suspects.popleft()
        return self._suspects[0] if self._suspects else None

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

    def take_prompt_logprobs(self, id: int, scores: list[Scores]) -> None:
        if (flight := self._flights.get(id)) is not None:
            flight.prompt_logprobs = scores

    def take_token(self, id: int, token: int, logprob: Scores | None = None) -> Flight | None:
        """None for a flight that left already. Tells the reader of the first token only; of others the caller does."""
        flight = self._flights.get(id)
        if flight is None:
            return None
        if flight.first_token_s is None:
            flight.first_token_s = time.monotonic()
            flight.changed.set()
        flight.tokens.append(token)
        if logprob is not None:
            flight.logprobs.append(logprob)
        return flight

    def take_back(self, over: Over) -> bool:
        """Whether this is the end of a flight's trial, and not its own: then it is held again."""
        flight = self._flights.get(over.id)
        if flight is None or not flight.called_back or over.reason != "abort":
            return False
        _keep_cached(flight, over)
        _land(flight)
        self._held[flight.id] = flight
        self._on_trial = None
        return True

    def end(self, over: Over) -> Flight | None:
        """A flight is over, for whatever reason. None if it was already."""
        flight = self._flights.pop(over.id, None)
        if flight is None:
            return None
        self._held.pop(over.id, None)
        flight.over = over
        flight.over_s = time.monotonic()
        _keep_cached(flight, over)
        flight.changed.set()
        if flight is self._on_trial:
            self._on_trial = None
        return flight

    def crash(self, blamed: Collection[int], *, from_outside: bool = False) -> list[Flight]:
        """The engine is gone. Everybody is held again; returns whom to refuse.

        `blamed` are those of the step that failed; empty when the engine could not tell.
        """
        tried = self._on_trial
        running = [flight for flight in self._flights.values() if flight.started]
        suspects = [flight for flight in running if flight.id in blamed] or running
        for flight in suspects:
            flight.num_kills = flight.num_kills + 1 if from_outside and _progress(flight) == 0 else int(from_outside)
            flight.num_tokens_at_crash = len(flight.tokens)
        if from_outside:
            suspects = [flight for flight in suspects if flight.num_kills >= MANY_KILLS]
        enough = MAX_KILLS if from_outside else 0
        refused = [flight for flight in suspects if flight is tried and flight.num_kills >= enough]
        if refused and not from_outside:
            self._suspects.clear()
        elif tried is not None:
            self._suspects.appendleft(tried)
        else:
            self._suspects.extend(sorted(suspects, key=lambda flight: -flight.id))
        self._on_trial = None
        for flight in self._flights.values():
            _land(flight)
        self._held = dict(self._flights)
        return refused


def _progress(flight: Flight) -> int:
    """New tokens since the last crash in which it ran."""
    return len(flight.tokens) - flight.num_tokens_at_crash


def _land(flight: Flight) -> None:
    flight.sent = flight.started = flight.called_back = False


def _keep_cached(flight: Flight, over: Over) -> None:
    """Keep the count of cached tokens from the first time that the flight ran, not from later ones."""
    if flight.num_cached is None:
        flight.num_cached = over.num_cached
