"""Idle time of a GPU between the launches of a step that is launched kernel by kernel.

A mark follows each launch. If the device has passed the last mark when the host comes with the next launch, it has been
idle since, and a second mark ends that stretch: the time between the two is the idle time, on the device's own clock.
If it has not, it had work to do meanwhile. Kernels of Triton are seen by its hooks, operations of torch by a dispatch
mode. Unseen: the launch call itself, a few microseconds each, because only a mark before it and one after it can be
timed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.device.base import ALLOCATION, COMPILE, INSIDE, LAUNCH
from gapless.device.kernel_hooks import around_launches
from gapless.device.late import Late

SHORTEST_S = 2e-6  # two marks with nothing between them may be so far apart
SLOW_S = 100e-6  # a launch, or the time between two, in which the host did more than launch
NO_WORK = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Two marks between which the device waited for the host, at most for so long."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    cause: int  # an index of INSIDE
    most_s: float = float("inf")

    def seconds(self) -> float:
        found = self.begin.elapsed_time(self.end) / 1e3
        return min(found, self.most_s) if found > SHORTEST_S else 0.0


class LaunchWatch:
    """The marks of one step. Belongs to the thread that launches."""

    def __init__(self, stream: torch.cuda.Stream, late: Late) -> None:
        self._stream = stream
        self._late = late
        self._free: list[torch.cuda.Event] = []
        self._used: list[torch.cuda.Event] = []
        self._stretches: list[Stretch] = []
        self._thread = 0
        self._is_on = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch the launches of this thread within the block."""
        self._thread = threading.get_ident()
        self._num_kernels = self._late.num_kernels
        self._late.note_allocations()
        self._entered = self._left = time.perf_counter()
        self._last = self._mark()
        self._is_on = True
        try:
            with around_launches(self._before_kernel, self._after_kernel), _Operations(self.before, self.after):
                yield
        finally:
            self._is_on = False
            self.before()

    @contextmanager
    def piece(self) -> Iterator[None]:
        """The block is one launch, while the watch is on."""
        if not self._is_on:
            yield
            return
        self.before()
        try:
            yield
        finally:
            self.after()

    def before(self) -> None:
        """The host is about to launch something."""
        self._entered = time.perf_counter()
        cause = self._cause(self._entered - self._left)
        if self._last.query():
            begin, self._last = self._last, self._mark()
            self._stretches.append(Stretch(begin, self._last, cause))

    def after(self) -> None:
        """The host has launched it. If that took long and the device ran dry, most of it came before the work."""
        self._left = time.perf_counter()
        took = self._left - self._entered
        was_late = took > SLOW_S and self._last.query()  # a host that waits for room in the queue is not
        begin, self._last = self._last, self._mark()
        if was_late:
            self._stretches.append(Stretch(begin, self._last, self._cause(took), took))

    def read(self) -> tuple[float, ...]:
        """Idle seconds by cause, in the order of INSIDE; then forget them. All marks must have passed."""
        found = [0.0] * len(INSIDE)
        try:
            for stretch in self._stretches:
                found[stretch.cause] += stretch.seconds()
        finally:
            self._stretches.clear()
            self._free += self._used
            self._used.clear()
        return tuple(found)

    def _mark(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        self._used.append(event)
        event.record(self._stream)
        return event

    def _cause(self, took: float) -> int:
        """What the host did meanwhile, apart from launching."""
        if self._num_kernels != self._late.num_kernels:
            self._num_kernels = self._late.num_kernels
            return COMPILE
        return ALLOCATION if took > SLOW_S and self._late.note_allocations() else LAUNCH

    def _before_kernel(self, metadata: Any) -> None:
        if threading.get_ident() == self._thread:
            self.before()

    def _after_kernel(self, metadata: Any) -> None:
        if threading.get_ident() == self._thread:
            self.after()


class _Operations(TorchDispatchMode):
    """Calls both functions around every operation of torch that may launch a kernel."""

    def __init__(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        super().__init__()
        self._before = before
        self._after = after

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is traced, and to say so would import all of torch's tracer: seconds

    def __torch_dispatch__(self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None) -> Any:
        launches = _LAUNCHES.get(func)
        if launches is None:
            launches = _LAUNCHES[func] = not func.is_view and func.name().partition(".")[0] not in NO_WORK
        if not launches:
            return func(*args, **(kwargs or {}))
        self._before()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._after()


_LAUNCHES: dict[Any, bool] = {}  # by operation
