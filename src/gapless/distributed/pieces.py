"""A run over replicas: lines go out in pieces, and their results come back as they complete.

Only this process writes results, so the guarantees of part files hold as they do for one engine. A piece is with one
replica at a time. If the replica dies, lines that have no result yet go to a different one, and give the same tokens
there: seeds come from the index of a line. So a kill costs time, and neither loses nor doubles a result.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from gapless.distributed.cluster import Placement, here
from gapless.distributed.replica import Replica, ReplicaFacts
from gapless.errors import ConfigError, OutputError
from gapless.formats.base import BadLine, Dialect, Line
from gapless.line_work import Keep

PIECES_A_BATCH = 4  # a full batch of an engine is this many pieces
PIECES_AHEAD = 12  # with one replica: three batches, so that slow rows of some pieces leave no row idle
MOST_ATTEMPTS = 10  # replicas that a piece may take with it before the run ends
MOST_FAILED_STARTS = 5  # in a row, of replicas that die before they are ready
POLL_S = 1.0
LONGEST_REASON = 300  # characters
PATIENCE_S = 300.0  # without any replica
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class WorkPiece:
    """Some lines, by index. Those that have a result are taken out."""

    lines: dict[int, Line | BadLine]
    num_attempts: int = 0  # since the last result


@dataclass(slots=True, eq=False)
class CrewMember:
    """A replica, as seen from here."""

    actor: Any
    facts: ReplicaFacts | None = None  # until it is ready
    calls: dict[Any, WorkPiece | None] = field(default_factory=dict)  # by reference; None: it loads


class Crew:
    """The replicas of a run. Starts them, gives them pieces, and replaces those that die."""

    def __init__(
        self, placement: Placement, options: Mapping[str, Any], dialect: Dialect, sampling: Mapping[str, Any]
    ) -> None:
        self._placement = placement
        self._setup = (here(), options, dialect, sampling)
        self._members: list[CrewMember] = []
        self._returned: deque[WorkPiece] = deque()
        self._num_failed_starts = 0
        self._worked_at = time.monotonic()
        self.num_lost = 0

    def do(self, todo: Iterator[Line | BadLine], num_todo: int, keep: Keep) -> None:
        """Run the lines. Raises ConfigError for what no replica can do, and OutputError when there are none left."""
        pieces = self._cut(todo, num_todo)
        more = True
        while True:
            self._recruit()
            for member in self._members:
                while more and member.facts is not None and len(member.calls) < PIECES_AHEAD:
                    piece = self._next(pieces)
                    if piece is None:
                        more = False
                    else:
                        self._give(member, piece)
            if not more and not any(piece for member in self._members for piece in member.calls.values()):
                return
            more = self._collect(keep) or more

    def _cut(self, todo: Iterator[Line | BadLine], num_todo: int) -> Iterator[WorkPiece]:
        """Small enough that every replica has some, and that a batch has several."""
        num_rows = max(member.facts.num_rows for member in self._members if member.facts is not None)
        share = num_todo // (self._placement.num_replicas * PIECES_AHEAD)
        size = max(1, min(num_rows // PIECES_A_BATCH, share))
        while lines := list(islice(todo, size)):
            yield WorkPiece({line.index: line for line in lines})

    def _next(self, pieces: Iterator[WorkPiece]) -> WorkPiece | None:
        return self._returned.popleft() if self._returned else next(pieces, None)

    def _give(self, member: CrewMember, piece: WorkPiece) -> None:
        piece.num_attempts += 1
        call = member.actor.complete.options(num_returns="streaming").remote(list(piece.lines.values()))
        member.calls[call] = piece

    def _recruit(self) -> None:
        import ray

        options = {
            "num_gpus": self._placement.num_gpus,
            "num_cpus": self._placement.num_cpus,
            "max_concurrency": PIECES_AHEAD + 1,
            "scheduling_strategy": "SPREAD",
        }
        remote: Any = ray.remote(Replica)
        while len(self._members) < self._placement.num_replicas:
            actor = remote.options(**options).remote()
            self._members.append(CrewMember(actor, calls={actor.load.remote(*self._setup): None}))

    def _collect(self, keep: Keep) -> bool:
        """Wait for some calls to end; whether a piece came back to be given again."""
        import ray

        calls = {ref: member for member in self._members for ref in member.calls}
        ready, _ = ray.wait(list(calls), num_returns=1, timeout=POLL_S)
        if any(member.facts is not None for member in self._members):
            self._worked_at = time.monotonic()
        elif time.monotonic() - self._worked_at > PATIENCE_S:
            raise OutputError(f"Ray has not placed a replica for {PATIENCE_S:.0f} s; see `ray status`")
        for ref in ready:
            member = calls[ref]
            if ref in member.calls:  # otherwise its replica was found dead with an earlier one
                self._end(member, ref, keep)
        return bool(self._returned)

    def _end(self, member: CrewMember, ref: Any, keep: Keep) -> None:
        import ray
        from ray.exceptions import RayError, RayTaskError

        piece = member.calls[ref]
        try:
            found = ray.get(ref if piece is None else next(ref))
        except StopIteration:
            del member.calls[ref]
            return None
        except RayTaskError as error:
            if piece is None and isinstance(error.cause, ConfigError):
                raise ConfigError(str(error.cause)) from None
            return self._lose(member, str(error.cause))
        except RayError as error:
            return self._lose(member, str(error))
        if piece is None:
            del member.calls[ref]
            member.facts, self._num_failed_starts = found, 0
            return None
        piece.num_attempts = 1
        for record, num_tokens in found:
            keep(piece.lines.pop(record["index"]), record, num_tokens)

    def _lose(self, member: CrewMember, why: str) -> None:
        """A replica has died; what it had goes to others."""
        import ray

        ray.kill(member.actor)  # it may live on behind a broken connection
        self._members.remove(member)
        self.num_lost += 1
        reason = _short(why)
        log.warning("a replica was lost and is replaced: %s", reason)
        if member.facts is None:
            self._num_failed_starts += 1
            if "No module named 'gapless" in why:
                raise ConfigError("a node of the cluster has no Gapless; install the same version on all nodes")
            if self._num_failed_starts >= MOST_FAILED_STARTS:
                raise OutputError(f"{MOST_FAILED_STARTS} replicas in a row died before they were ready: {reason}")
        for piece in member.calls.values():
            if piece is not None and piece.lines:
                self._check_attempts(piece, reason)
                self._returned.append(piece)
        member.calls.clear()

    def _check_attempts(self, piece: WorkPiece, reason: str) -> None:
        if piece.num_attempts >= MOST_ATTEMPTS:
            ids = ", ".join(repr(line.id) for line in islice(piece.lines.values(), 5))
            raise OutputError(f"{MOST_ATTEMPTS} replicas died with the prompts {ids}: {reason}")


def _short(why: str) -> str:
    """Ray explains a death in many lines; one of them says what died."""
    text = " ".join(why.split())
    cause = re.search(r"because (its [^.]*)", text)
    return cause.group(1) if cause else text.split(". ")[0][:LONGEST_REASON]
