"""What comes out of a step: new tokens, ended requests, and what was counted on the way.

Values only. The scheduler makes them; the output side reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gapless.core.request import Request


@dataclass(frozen=True, slots=True)
class Progress:
    """One new token of a request that streams."""

    request: Request
    token: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that left for good."""

    request: Request
    reason: str  # "stop", "length", "abort" or "error"
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """What a step brought, in the order of its rows."""

    num_tokens: int
    progress: tuple[Progress, ...]
    finished: tuple[Finished, ...]


@dataclass(slots=True)
class Counters:
    """What happened so far. Only ever grows."""

    num_steps: int = 0
    num_prompt_tokens: int = 0  # of admitted requests, each counted once
    num_cached_tokens: int = 0  # of those, found in the prefix cache
    num_generated: int = 0
    num_overrun: int = 0  # samples of a request that had already left its row
    num_preemptions: int = 0
    num_recomputed: int = 0  # positions that a preemption threw away
