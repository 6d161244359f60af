"""When the readers of flights are woken: as each token comes while they are few, else as often as they can be served.

A reader that is woken writes to its socket, and that costs the event loop far more than the token itself. Woken for
every token, a few hundred streams would keep the loop so busy that new requests wait for their turn. So wake-ups have a
rate. Beyond it flights stand in line, the tokens of a flight gather, and its reader finds several at once. The first
token and the end of a flight do not come through here: they are told at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from gapless.server.roster import Flight

READER_S = 80e-6  # of the event loop's time for one wake-up: a reader takes about 40 us of it, and others need the rest
MOST_AT_ONCE = 64  # after a quiet time


class Doorbell:
    """The line of flights whose readers are to be woken, in the order in which they joined it."""

    def __init__(self, reader_s: float = READER_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader_s = reader_s
        self._clock = clock
        self._line: deque[Flight] = deque()
        self._credit = float(MOST_AT_ONCE)  # wake-ups that are due
        self._last_s = clock()
        self._timer: asyncio.TimerHandle | None = None

    def line_up(self, flight: Flight) -> None:
        """Its reader is to be woken, unless it was and has not looked yet. A flight stands in line once."""
        if not flight.in_line and not flight.changed.is_set():
            flight.in_line = True
            self._line.append(flight)

    def ring(self) -> None:
        """Wake as many as are due. Whoever is left is woken later, even if nobody calls again."""
        now_s = self._clock()
        self._credit = min(self._credit + (now_s - self._last_s) / self._reader_s, MOST_AT_ONCE)
        self._last_s = now_s
        while self._line and self._credit >= 1:
            flight = self._line.popleft()
            flight.in_line = False
            if flight.over is None:  # otherwise its reader was told
                flight.changed.set()
                self._credit -= 1
        if self._line and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._reader_s * MOST_AT_ONCE, self._ring_again)

    def _ring_again(self) -> None:
        self._timer = None
        self.ring()
