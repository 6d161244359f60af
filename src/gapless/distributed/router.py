"""Chooses a replica for each request, by the longest cached prefix and the load.

    score = prompt tokens that the replica would have to compute + its load
    load  = prompt tokens that it has yet to compute for others + REQUEST_TOKENS for each unfinished request

The lowest score wins. Among equal scores, the replica that was chosen longest ago wins, so equals take turns. Requests
of one session stay with their replica while it accepts requests. A pure object: no network, no clock, no threads. The
caller tells what becomes of requests and replicas, from one thread.

    joined --> accepting --> draining --> gone       drain: no new requests; leave: from any state, at once
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gapless.distributed.prefix_map import BLOCK_TOKENS, PrefixMap, TokenCounts
from gapless.errors import ConfigError, NoReplica

REQUEST_TOKENS = 64  # an unfinished request delays others as this many prompt tokens do
MOST_SESSIONS = 100_000  # that are remembered

PromptTokens = Sequence[int] | npt.NDArray[np.int32]
ReplicaScores = npt.NDArray[np.float64]
# of the load of each replica, and the prompt tokens to compute there
Policy = Callable[[TokenCounts, TokenCounts], ReplicaScores]


def by_prefix(loads: TokenCounts, left: TokenCounts) -> ReplicaScores:
    """What the request waits for: others, and its own prompt."""
    return (loads + left).astype(np.float64)


def by_load(loads: TokenCounts, left: TokenCounts) -> ReplicaScores:
    """What the request waits for, as if no replica had its prefix."""
    return loads.astype(np.float64)


def at_random(seed: int) -> Policy:
    """Any replica, from a seed."""
    draw = np.random.default_rng(seed)
    return lambda loads, left: draw.random(len(loads))


POLICIES = ("prefix", "load", "random")


def policy_of(name: str, seed: int = 0) -> Policy:
    """The policy of this name. Raises ConfigError."""
    if name not in POLICIES:
        raise ConfigError(f"routing must be one of {', '.join(POLICIES)}, not {name!r}")
    return {"prefix": by_prefix, "load": by_load, "random": at_random(seed)}[name]


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes, and how many of its prompt tokens are probably cached there."""

    replica: str
    num_cached: int


@dataclass(slots=True)
class Place:
    """A replica as the router sees it."""

    name: str
    slot: int
    accepts: bool = True
    requests: dict[str, _Sent] = field(default_factory=dict)  # unfinished, by id

    @property
    def state(self) -> str:
        return "accepting" if self.accepts else "draining"


@dataclass(slots=True)
class _Sent:
    """A request that was sent to a replica."""

    hashes: list[bytes]
    num_left: int  # prompt tokens that the replica has yet to compute for it


@dataclass(slots=True)
class RouterCounters:
    """Sums since the start."""

    num_routed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of these, probably found in a cache
    num_kept: int = 0  # sent where their session was


class Router:
    """Replicas join and leave; requests are routed, start and finish."""

    def __init__(self, policy: str | Policy = "prefix", *, block_tokens: int = BLOCK_TOKENS, seed: int = 0) -> None:
        if block_tokens < 1:
            raise ConfigError(f"block_tokens must be at least 1, not {block_tokens}")
        self._policy = policy_of(policy, seed) if isinstance(policy, str) else policy
        self.counters = RouterCounters()
        self._prefixes = PrefixMap(block_tokens)
        self._places: dict[str, Place] = {}
        self._slots: list[Place | None] = []
        self._load = np.zeros(0, np.int64)
        self._accepts = np.zeros(0, np.bool_)
        self._chosen = np.zeros(0, np.int64)  # turn in which each slot was last chosen
        self._turn = 0
        self._where: dict[str, Place] = {}  # of each unfinished request
        self._sessions: OrderedDict[str, str] = OrderedDict()  # replica of each, the least recently used first

    # -- replicas ------------------------------------------------------------------------------------------------

    @property
    def places(self) -> list[Place]:
        """All replicas, in the order in which they joined."""
        return list(self._places.values())

    def load_of(self, replica: str) -> int:
        return int(self._load[self._places[replica].slot])

    def join(self, replica: str, cache_tokens: int) -> None:
        """A replica accepts requests. cache_tokens: what its KV memory holds; 0 where it has no prefix cache.

        A replica that comes back under its old name has an empty cache: it must `leave` before it joins again.
        """
        if replica in self._places:
            raise ConfigError(f"replica {replica!r} has joined already")
        slot = self._free_slot()
        place = Place(replica, slot)
        self._places[replica] = self._slots[slot] = place
        self._load[slot], self._accepts[slot], self._chosen[slot] = 0, True, 0
        self._prefixes.join(slot, cache_tokens)

    def drain(self, replica: str) -> None:
        """No new requests for this replica; those that it has go on. Unknown names are ignored."""
        if (place := self._places.get(replica)) is not None:
            place.accepts = self._accepts[place.slot] = False

    def leave(self, replica: str) -> list[str]:
        """The replica is gone. Returns the ids of its unfinished requests, which may be routed again."""
        place = self._places.pop(replica, None)
        if place is None:
            return []
        self._slots[place.slot] = None
        self._accepts[place.slot] = False
        self._prefixes.leave(place.slot)
        for request_id in place.requests:
            del self._where[request_id]
        return list(place.requests)

    def _free_slot(self) -> int:
        if None in self._slots:
            return self._slots.index(None)
        self._slots.append(None)
        self._load, self._chosen = (np.append(array, 0) for array in (self._load, self._chosen))
        self._accepts = np.append(self._accepts, False)
        return len(self._slots) - 1

    # -- requests ------------------------------------------------------------------------------------------------

    def route(self, request_id: str, tokens: PromptTokens, session: str | None = None) -> Route:
        """Choose a replica. A request that was routed before moves. Raises NoReplica.

        session: requests with the same key stay together, whatever the policy.
        """
        self.finished(request_id)
        hashes = self._prefixes.hashes(tokens)
        usable = hashes[: max(len(tokens) - 1, 0) // self._prefixes.block_tokens]  # the last token is always computed
        cached = self._prefixes.num_cached(usable, len(self._slots))
        place = self._place_of_session(session) or self._best(len(tokens) - cached)
        num_cached = int(cached[place.slot])
        self._send(request_id, place, _Sent(hashes, len(tokens) - num_cached))
        if session is not None:
            self._remember(session, place)
        self.counters.num_routed += 1
        self.counters.num_prompt_tokens += len(tokens)
        self.counters.num_cached_tokens += num_cached
        return Route(place.name, num_cached)

    def started(self, request_id: str) -> None:
        """Its first token is here: its prompt delays nobody any more. Unknown ids are ignored."""
        if (place := self._where.get(request_id)) is not None:
            sent = place.requests[request_id]
            self._load[place.slot] -= sent.num_left
            sent.num_left = 0

    def finished(self, request_id: str, tokens: PromptTokens | None = None) -> None:
        """It ended, for whatever reason. tokens: prompt and answer, which a next question may begin with."""
        place = self._where.pop(request_id, None)
        if place is None:
            return
        sent = place.requests.pop(request_id)
        self._load[place.slot] -= sent.num_left + REQUEST_TOKENS
        self._prefixes.touch(place.slot, sent.hashes if tokens is None else self._prefixes.hashes(tokens))

    def evicted(self, replica: str, tokens: PromptTokens, num_kept: int = 0) -> None:
        """The replica dropped what followed the first `num_kept` of these tokens. Unknown names are ignored."""
        if (place := self._places.get(replica)) is not None:
            hashes = self._prefixes.hashes(tokens)
            self._prefixes.forget(place.slot, hashes[num_kept // self._prefixes.block_tokens :])

    # -- choosing ------------------------------------------------------------------------------------------------

    def _best(self, left: TokenCounts) -> Place:
        if not self._accepts.any():
            raise NoReplica(self._why_none())
        scores = np.where(self._accepts, self._policy(self._load, left), np.inf)
        equals = np.flatnonzero(scores == scores.min())
        place = self._slots[int(equals[self._chosen[equals].argmin()])]
        assert place is not None
        return place

    def _why_none(self) -> str:
        if not self._places:
            return "no replica is running"
        return f"none of {len(self._places)} replicas accepts requests: all are draining"

    def _place_of_session(self, session: str | None) -> Place | None:
        if session is None or (name := self._sessions.get(session)) is None:
            return None
        place = self._places.get(name)
        if place is None or not place.accepts:
            return None
        self.counters.num_kept += 1
        return place

    def _remember(self, session: str, place: Place) -> None:
        self._sessions[session] = place.name
        self._sessions.move_to_end(session)
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)

    def _send(self, request_id: str, place: Place, sent: _Sent) -> None:
        place.requests[request_id] = sent
        self._where[request_id] = place
        self._load[place.slot] += sent.num_left + REQUEST_TOKENS
        self._turn += 1
        self._chosen[place.slot] = self._turn
        self._prefixes.touch(place.slot, sent.hashes)
