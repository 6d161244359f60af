"""The base of devices that wrap a device. Everything that it does not change goes to the inner device.

For devices that add something to any device: a checker, delays. Knows nothing of what they add.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from gapless.device.base import Buffer, Device, Event, P, Stream, T, Timer


class WrappedDevice:
    """The inner device, with its streams replaced by the results of `wrap`."""

    def __init__(self, inner: Device, wrap: Callable[[Stream], Stream]) -> None:
        self._inner = inner
        self.torch_device = inner.torch_device
        self.num_cores = inner.num_cores
        self.late = inner.late
        self._wrap = wrap
        self._wrapped: dict[str, Stream] = {}

    def stream(self, name: str) -> Stream:
        if name not in self._wrapped:
            self._wrapped[name] = self._wrap(self._inner.stream(name))
        return self._wrapped[name]

    def event(self, name: str) -> Event:
        return self._inner.event(name)

    def timer(self) -> Timer:
        return self._inner.timer()

    def watch(self) -> AbstractContextManager[None]:
        return self._inner.watch()

    def as_launch(self, fn: Callable[P, T]) -> Callable[P, T]:
        return self._inner.as_launch(fn)

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype, *, host: bool = False) -> Buffer:
        return self._inner.buffer(name, shape, dtype, host=host)

    def touch(self, label: str, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> None:
        self._inner.touch(label, reads=reads, writes=writes)

    def release(self, label: str, buffers: Sequence[Buffer]) -> None:
        self._inner.release(label, buffers)

    def kv_budget(self, dry_run: Callable[[], None]) -> int:
        return self._inner.kv_budget(dry_run)

    def memory_held(self) -> int:
        return self._inner.memory_held()

    def close(self) -> None:
        self._inner.close()
