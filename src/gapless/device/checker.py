"""A device that raises when two overlapping accesses of one buffer are not ordered by an event.

Wraps any device. Keeps a vector clock for the host and for each stream, advanced by `record`, `wait` and `synchronize`
as they are queued, so a race is found at any timing. A released buffer gets a new generation and is filled with poison.
A read before the next write raises, and an undeclared read shows as nonsense. Sees only the accesses that `run`,
`touch` and `release` name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from gapless.device.base import Buffer, Device, Event, Stream
from gapless.device.wrapper import WrappedDevice
from gapless.errors import RaceError

HOST = "host"
POISON = 0x5A5A5A5A  # no token, no row, no block
Clock = dict[str, int]  # actor -> how much of its past is known to lie before


def _join(clock: Clock, other: Clock) -> None:
    for actor, time in other.items():
        if time > clock.get(actor, 0):
            clock[actor] = time


@dataclass(frozen=True)
class Access:
    """The latest read or write of a buffer by one actor."""

    actor: str
    time: int
    label: str
    verb: str

    def precedes(self, clock: Clock) -> bool:
        return clock.get(self.actor, 0) >= self.time


@dataclass
class History:
    """The state of one buffer: its last write, each actor's last read since, and its release if unwritten since."""

    write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)
    released: Access | None = None  # None once it is written again
    generation: int = 0  # how often it was released


class Checker:
    """Vector clocks of all actors, and the history of all buffers."""

    def __init__(self) -> None:
        self._clocks: dict[str, Clock] = {HOST: {HOST: 1}}
        self._histories: dict[int, tuple[Buffer, History]] = {}  # keeps the buffer, so that its id stays its own
        self.num_accesses = 0

    def clock(self, actor: str) -> Clock:
        return self._clocks.setdefault(actor, {})

    def access(self, actor: str, label: str, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> None:
        clock = self.clock(actor)
        if actor != HOST:
            _join(clock, self._clocks[HOST])  # queueing orders all that the host did or knew before
        clock[actor] = clock.get(actor, 0) + 1
        for buffer in reads:
            self._read(buffer, Access(actor, clock[actor], label, "reads"), clock)
        for buffer in writes:
            self._write(buffer, Access(actor, clock[actor], label, "writes"), clock)
        self.num_accesses += len(reads) + len(writes)

    def release(self, label: str, buffers: Sequence[Buffer]) -> None:
        """The host gives the buffers back: as a write, it must come after every other access."""
        clock = self.clock(HOST)
        clock[HOST] += 1
        for buffer in buffers:
            access = Access(HOST, clock[HOST], label, "releases")
            self._write(buffer, access, clock)
            history = self._history(buffer)
            history.released = access
            history.generation += 1
        self.num_accesses += len(buffers)

    def generation(self, buffer: Buffer) -> int:
        return self._history(buffer).generation

    def _history(self, buffer: Buffer) -> History:
        return self._histories.setdefault(id(buffer), (buffer, History()))[1]

    def _read(self, buffer: Buffer, access: Access, clock: Clock) -> None:
        history = self._history(buffer)
        _require(history.write, access, clock, buffer)
        if history.released is not None:
            raise RaceError(
                f"{access.label} ({access.actor}) reads '{buffer.name}', which nobody has written since "
                f"{history.released.label} released it (generation {history.generation})"
            )
        history.reads[access.actor] = access

    def _write(self, buffer: Buffer, access: Access, clock: Clock) -> None:
        history = self._history(buffer)
        _require(history.write, access, clock, buffer)
        for read in history.reads.values():
            _require(read, access, clock, buffer)
        history.write = access
        history.reads.clear()
        history.released = None


def _require(earlier: Access | None, later: Access, clock: Clock, buffer: Buffer) -> None:
    if earlier is not None and not earlier.precedes(clock):
        raise RaceError(
            f"{later.label} ({later.actor}) {later.verb} '{buffer.name}' with no event after "
            f"{earlier.label} ({earlier.actor}), which {earlier.verb} it"
        )


def _fill(tensor: torch.Tensor) -> None:
    tensor.fill_(POISON)


class CheckedEvent:
    """An event that stores the clock of its recording stream."""

    def __init__(self, inner: Event, checker: Checker) -> None:
        self.name = inner.name
        self.inner = inner
        self.known: Clock = {}
        self._checker = checker

    def synchronize(self) -> None:
        known = dict(self.known)
        try:
            self.inner.synchronize()
        finally:
            _join(self._checker.clock(HOST), known)

    def query(self) -> bool:
        done = self.inner.query()
        if done:
            _join(self._checker.clock(HOST), self.known)
        return done


class CheckedStream:
    """A stream whose operations are checked as they are queued."""

    def __init__(self, inner: Stream, checker: Checker) -> None:
        self.name = inner.name
        self._inner = inner
        self._checker = checker

    def run(
        self, fn: Callable[[], None], label: str, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        self._checker.access(self.name, label, reads, writes)
        self._inner.run(fn, label, reads=reads, writes=writes)

    def record(self, event: Event) -> None:
        assert isinstance(event, CheckedEvent)
        event.known = dict(self._checker.clock(self.name))
        self._inner.record(event.inner)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CheckedEvent)
        _join(self._checker.clock(self.name), event.known)
        self._inner.wait(event.inner)

    def pause(self, delay_s: float) -> None:
        self._inner.pause(delay_s)


class CheckedDevice(WrappedDevice):
    """Any device, checked."""

    def __init__(self, inner: Device) -> None:
        self.checker = Checker()
        super().__init__(inner, lambda stream: CheckedStream(stream, self.checker))

    def event(self, name: str) -> CheckedEvent:
        return CheckedEvent(super().event(name), self.checker)

    def touch(self, label: str, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> None:
        self.checker.access(HOST, label, reads, writes)
        super().touch(label, reads=reads, writes=writes)

    def release(self, label: str, buffers: Sequence[Buffer]) -> None:
        self.checker.release(label, buffers)
        super().release(label, buffers)
        for buffer in buffers:
            self._poison(buffer.tensor)

    def _poison(self, tensor: torch.Tensor) -> None:
        """The host is known to be last; where it cannot write itself, it waits for a stream that has little to do."""
        if tensor.device.type == "cpu":
            tensor.fill_(POISON)
            return
        over = self._inner.event("poisoned")
        h2d = self._inner.stream("h2d")
        h2d.run(lambda: _fill(tensor), "poison")
        h2d.record(over)
        over.synchronize()
