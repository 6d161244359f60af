"""Messages that callers put into the engine's inbox, and the safe call of their callbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from gapless.core.outcome import Finished, Progress
from gapless.core.request import Request

log = logging.getLogger(__name__)

Deliver = Callable[[Progress | Finished], None]


@dataclass(frozen=True, slots=True)
class Submit:
    """Inbox: a new request."""

    request: Request
    deliver: Deliver
    on_start: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Inbox: end a request."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Inbox: a sign of life, from the loop's own thread."""

    answer: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Compiled:
    """Inbox: the grammar that a request waits for is there, or is refused."""

    request: Request


@dataclass(frozen=True, slots=True)
class Loss:
    """Inbox: something that every step needs is gone, so the engine must die."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Close:
    """Inbox: end everything."""


def call_safely(callback: Callable[..., object], *news: Progress | Finished) -> bool:
    """Call what a client gave us. Nothing that it raises, `SystemExit` included, reaches the loop."""
    try:
        callback(*news)
    except BaseException:
        log.exception("a client's callback raised")
        return False
    return True
