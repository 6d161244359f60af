"""The vocabulary of order: buffers, streams, events, and the device that makes them.

A stream runs its operations in order. Only events order two streams, or a stream and the host: `record` marks a point
on a stream, `wait` makes a different stream wait for that point, `synchronize` makes the host wait. Semantics are
CUDA's: `wait` and `synchronize` refer to the latest `record` at the time they are called, and an event that was never
recorded delays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
import torch

from gapless.device.late import Late

P = ParamSpec("P")
T = TypeVar("T")


class Buffer:
    """Memory with a name, by which the checker identifies it."""

    __slots__ = ("array", "name", "tensor")

    def __init__(self, name: str, tensor: torch.Tensor, *, host: bool) -> None:
        self.name = name
        self.tensor = tensor
        self.array: np.ndarray[Any, Any] = tensor.numpy() if host else np.empty(0)  # host's own view of the memory

    def __repr__(self) -> str:
        return f"Buffer({self.name})"


class Event(Protocol):
    """A point on a stream."""

    name: str

    def synchronize(self) -> None:
        """Make the host wait until the recorded point is reached; raise what the stream raised before it."""

    def query(self) -> bool:
        """True when `synchronize` would return at once."""


class Stream(Protocol):
    """An ordered queue of work that runs beside the host."""

    name: str

    def run(
        self, fn: Callable[[], None], label: str, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        """Queue `fn`, which touches these buffers and no others."""

    def record(self, event: Event) -> None:
        """Queue the marking of `event`."""

    def wait(self, event: Event) -> None:
        """Queue a wait for the latest record of `event`."""

    def pause(self, delay_s: float) -> None:
        """Queue a delay. For checks with different timing."""


STREAMS = ("h2d", "compute", "d2h")  # copies in, the model, copies out
H2D, COMPUTE, D2H, SAMPLING = range(4)  # the parts of a step, as a timer numbers them
NEVER = float("nan")
INSIDE = ("launch", "compile", "allocation", "masks")  # why the device idled within a computation
LAUNCH, COMPILE, ALLOCATION, MASKS = range(len(INSIDE))


class Timer(Protocol):
    """When the three parts of one step ran, by the host's clock, `time.perf_counter`.

    The computation of a split step comes as two pieces, COMPUTE and SAMPLING. What lies between them is idle time.
    """

    def around(self, part: int, fn: Callable[[], None]) -> Callable[[], None]:
        """`fn`, timed where and when its stream runs it."""

    def read(self) -> tuple[float, ...]:
        """Begin and end of each part, six numbers, NaN for parts that did not run; then the idle seconds within the
        computation by cause, in the order of INSIDE, as far as it was watched; then forget them.

        Never waits: call it once the step's last event has passed.
        """


class Device(Protocol):
    """Streams and the memory they work on."""

    torch_device: torch.device
    num_cores: int  # that work on a kernel at the same time
    late: Late  # what happens for the first time after the engine is ready

    def stream(self, name: str) -> Stream:
        """The stream of this name, made when it is first asked for. A step uses those of STREAMS."""

    def event(self, name: str) -> Event:
        """Make an event."""

    def timer(self) -> Timer:
        """Make a timer, for one step at a time."""

    def watch(self) -> AbstractContextManager[None]:
        """Within a timed computation, around work that is launched piece by piece: idle time between the pieces is
        found, and given to the step's timer. Nothing where a step is not timed, or is one piece.

        Pieces are kernels of Triton, operations of torch, and calls of what `as_launch` made. Work that is launched in
        any other way, such as a captured graph, would be taken for idle time.
        """

    def as_launch(self, fn: Callable[P, T]) -> Callable[P, T]:
        """`fn`, which launches work that neither Triton nor torch knows of, as one piece for `watch`."""

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype, *, host: bool = False) -> Buffer:
        """Make a zeroed buffer in device memory, or in host memory from which copies can be asynchronous."""

    def touch(self, label: str, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> None:
        """Declare that the host accesses these buffers now."""

    def release(self, label: str, buffers: Sequence[Buffer]) -> None:
        """Declare that the content of these buffers is no longer valid until they are written again."""

    def kv_budget(self, dry_run: Callable[[], None]) -> int:
        """Default size of a KV cache in bytes, when a step also needs what `dry_run` needs."""

    def memory_held(self) -> int:
        """Most bytes of device memory in use so far; 0 where that is the host's memory."""

    def close(self) -> None:
        """Finish the queued work and stop the streams."""
