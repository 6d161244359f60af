"""A device with random timing: short delays of the host and of the streams, drawn from a seed.

Wraps any device. Changes when operations run, but not the order that the events require. For checks on devices whose
order cannot be chosen. Knows nothing of batches or models.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from gapless.device.base import Buffer, Device, Event, Stream
from gapless.device.wrapper import WrappedDevice

SHARE = 0.4  # share of delayed operations
LONGEST_S = 400e-6


class JitterStream:
    """A stream that now and then pauses before its next operation, or whose caller does."""

    def __init__(self, inner: Stream, dice: random.Random) -> None:
        self.name = inner.name
        self._inner = inner
        self._dice = dice

    def run(
        self, fn: Callable[[], None], label: str, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        if self._dice.random() < SHARE:
            self._inner.pause(self._dice.random() * LONGEST_S)
        if self._dice.random() < SHARE:
            time.sleep(self._dice.random() * LONGEST_S)
        self._inner.run(fn, label, reads=reads, writes=writes)

    def record(self, event: Event) -> None:
        self._inner.record(event)

    def wait(self, event: Event) -> None:
        self._inner.wait(event)

    def pause(self, delay_s: float) -> None:
        self._inner.pause(delay_s)


class JitterDevice(WrappedDevice):
    """Any device, with random delays."""

    def __init__(self, inner: Device, seed: int) -> None:
        dice = random.Random(seed)
        super().__init__(inner, lambda stream: JitterStream(stream, dice))
