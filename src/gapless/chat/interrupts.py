"""Ctrl-C in a conversation: it stops what is going on, and not the program.

Owns the handler of SIGINT while a conversation runs. SIGTERM keeps its meaning.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Stopped(KeyboardInterrupt):
    """Ctrl-C while there was something to stop."""


class Interrupts:
    """Ctrl-C raises `Stopped` within `stoppable`, once. Elsewhere, and while that is being handled, it does nothing."""

    def __init__(self) -> None:
        self._can_stop = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._can_stop:
            self._can_stop = False
            raise Stopped

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Take SIGINT over for the block, unless it is ignored from the start."""
        before = signal.getsignal(signal.SIGINT)
        if before is signal.SIG_IGN:
            yield
            return
        signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """A block that Ctrl-C may stop."""
        self._can_stop = True
        try:
            yield
        finally:
            self._can_stop = False
