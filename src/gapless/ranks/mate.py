"""Another rank as rank 0 sees it: what it has said, and what became of it. Squads are mates that are reached alike.

A squad starts its ranks and carries plans to them. There is one for the ranks of this machine and one for ranks on
other nodes; a team does not know which is which.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from gapless.core.request import IntArray
from gapless.ranks.link import Link, Word

GRACE_S = 0.3  # in which others may fail too, before the first cause is named
LOST = 2  # how far from the first cause a rank is that only missed the others


class RankLife(Protocol):
    """The process of a rank, wherever it is."""

    def kill(self) -> None: ...

    def wait(self, timeout_s: float) -> str | None:
        """How it ended, in words; None while it lives, as far as one can know here."""


@dataclass(eq=False, slots=True)
class Mate:
    """One of the other ranks."""

    rank: int
    name: str
    life: RankLife
    link: Link
    values: dict[str, Any]  # what it alone is told at the start
    kinds: set[str] = field(default_factory=set)  # of the words that it has said
    last_word: Word | None = None  # why it failed
    is_gone: bool = False

    def end(self) -> tuple[int, str]:
        """What became of it: how far from the first cause, and in words."""
        if self.last_word is not None:
            return (LOST if self.last_word["lost"] else 1), f"{self.name} failed: {self.last_word['reason']}"
        return 0, f"{self.name} {self.life.wait(GRACE_S) or 'closed its connection'}"


class Squad(Protocol):
    """Ranks that are reached in the same way. Methods of plans raise RankFailed when a time limit has passed."""

    def start(self) -> Iterator[Mate]:
        """Each rank as soon as it can be talked to."""

    def open(self, num_places: int, place_words: int) -> None:
        """Tell the ranks, which are ready, that plans will come: so many at a time, of so many words at most."""

    def write(self, words: IntArray) -> None:
        """Hand a plan to every rank."""

    def hang_up(self) -> None:
        """No more plans: ranks end with those that they have."""

    def close(self) -> None:
        """Give back what is left, once every rank has ended."""


def how_it_ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
