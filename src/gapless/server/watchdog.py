"""Notices an engine process that no longer moves, while it loads and after.

    loading   a sign every fraction of a second: tensors loaded and processor time used
    ready     a pulse every fraction of a second: turns of the loop

A process that is stopped sends nothing. A process that is stuck sends the same sign again and again. Either way its
time runs out. Knows no process: it is told what came, and says what is overdue.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gapless.server.messages import EnginePulse, Loading


class Watchdog:
    """The deadline of one engine process at a time."""

    def __init__(
        self, load_timeout_s: float, step_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._load_timeout_s = load_timeout_s
        self._step_timeout_s = step_timeout_s
        self._clock = clock
        self._is_ready = False
        self._moved_s = clock()
        self._last_sign: object = None

    def start(self) -> None:
        """A new process was started."""
        self._is_ready = False
        self._move(None)

    def ready(self) -> None:
        """It takes requests."""
        self._is_ready = True
        self._move(None)

    def see_loading(self, sign: Loading) -> None:
        if sign != self._last_sign:
            self._move(sign)

    def see_pulse(self, pulse: EnginePulse) -> None:
        if pulse.idle or pulse.num_turns != self._last_sign:
            self._move(pulse.num_turns)

    def overdue(self) -> str | None:
        """Why the process should be killed, or None."""
        waited_s = self._clock() - self._moved_s
        if self._is_ready and waited_s > self._step_timeout_s:
            return f"no step ended within {self._step_timeout_s:g} s"
        if not self._is_ready and waited_s > self._load_timeout_s:
            return f"loading made no progress within {self._load_timeout_s:g} s"
        return None

    def _move(self, sign: object) -> None:
        self._last_sign = sign
        self._moved_s = self._clock()
