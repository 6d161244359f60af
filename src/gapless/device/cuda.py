"""Streams and events on an NVIDIA GPU.

Makes streams of its own, none of them the default stream, and host buffers in pinned memory. The host polls an
event and naps between polls. Knows nothing of batches or models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from gapless.device import kernel_hooks
from gapless.device.base import COMPUTE, D2H, H2D, INSIDE, NEVER, SAMPLING, STREAMS, Buffer, Event, P, T
from gapless.device.cuda_watch import LaunchWatch
from gapless.device.late import Late

ANCHOR_TRIES = 8
RESERVE_BYTES = 6 * 2**30  # for captured graphs, the libraries' workspaces, and what the allocator cannot use
REPLAYS = 6  # of a graph that is timed
CYCLES_PER_S = 1.5e9  # about: of the clock that a pause counts
NAP_S = 30e-6  # between two polls of an event; the system makes about 90 of it


class CudaEvent:
    """A CUDA event without timing.

    A blocking wait of the driver is woken by an interrupt, which now and then comes milliseconds late. Spinning takes a
    whole core. Naps avoid both.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.inner = torch.cuda.Event()

    def synchronize(self) -> None:
        while not self.inner.query():
            time.sleep(NAP_S)

    def query(self) -> bool:
        done: bool = self.inner.query()
        return done


class CudaStream:
    """A CUDA stream."""

    def __init__(self, name: str, late: Late) -> None:
        self.name = name
        self.inner = torch.cuda.Stream()
        self._late = late

    def run(
        self, fn: Callable[[], None], label: str, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        self._late.where = label
        torch.cuda.set_stream(self.inner)  # not restored: that would cost more than a graph's launch
        fn()

    def record(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.inner.record(self.inner)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.inner.wait_event(event.inner)

    def pause(self, delay_s: float) -> None:
        torch.cuda.set_stream(self.inner)
        torch.cuda._sleep(int(delay_s * CYCLES_PER_S))


class CudaClock:
    """Puts points of the device's time on the host's clock.

    The device measures from one event to a later one, in milliseconds of 32 bits: exact over a step, useless over an
    hour. So each step is measured from the previous one, and the sum is kept in 64 bits. The two clocks drift apart by
    some microseconds a second. `settle` corrects that, since no work begins before it is queued or ends after it was
    seen.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.timer: CudaTimer | None = None  # of the computation that is being launched
        best = float("inf")
        for _ in range(ANCHOR_TRIES):  # once, at the start: the only wait
            event = torch.cuda.Event(enable_timing=True)
            before = time.perf_counter()
            event.record(stream)
            event.synchronize()
            after = time.perf_counter()
            if after - before < best:
                best, self._time, self._event = after - before, (before + after) / 2, event

    def time(self, event: torch.cuda.Event) -> float:
        """When a passed event was reached."""
        return float(self._time + self._event.elapsed_time(event) / 1e3)

    def settle(self, queued: float, began: float, ended: float, seen: float) -> float:
        """Shift the clock so that work lies between its queueing and the moment it was seen to be over; return the
        shift.
        """
        shift = max(queued - began, 0.0) or min(seen - ended, 0.0)
        self._time += shift
        return shift

    def move(self, event: torch.cuda.Event) -> torch.cuda.Event:
        """Measure from this event from now on; return the previous one for reuse."""
        self._time = self.time(event)
        self._event, free = event, self._event
        return free


class CudaTimer:
    """Timing events around the parts of a step. The copy out begins where the computation ends: one event for both.

    A step without a copy in has no times for it.
    """

    def __init__(self, clock: CudaClock, streams: Sequence[torch.cuda.Stream], late: Late) -> None:
        self._clock = clock
        self.watch = LaunchWatch(streams[COMPUTE], late)
        self._streams = streams
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(5)]  # of three parts; the last has no begin
        self._between = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # where a split computation pauses
        self._queued = NEVER  # when the first part was
        self._copies_in = self._is_split = False

    def around(self, part: int, fn: Callable[[], None]) -> Callable[[], None]:
        stream, events = self._streams[COMPUTE if part == SAMPLING else part], self._events

        def timed() -> None:
            if part == H2D or (part == COMPUTE and not self._copies_in):
                self._queued = time.perf_counter()
                self._copies_in = part == H2D
            if part == SAMPLING:
                events[3], self._between[0] = self._between[0], events[3]  # the end so far, which was recorded
                self._between[1].record(stream)
                self._is_split = True
            elif part != D2H:
                events[2 * part].record(stream)
            self._clock.timer = self if part in (COMPUTE, SAMPLING) else None
            try:
                fn()
            finally:
                self._clock.timer = None
                events[3 if part == SAMPLING else min(2 * part + 1, 4)].record(stream)

        return timed

    def read(self) -> tuple[float, ...]:
        first, is_split = 0 if self._copies_in else 2, self._is_split
        self._copies_in = self._is_split = False
        try:
            *idle, between = self.watch.read()
            if is_split:
                between += self._between[0].elapsed_time(self._between[1]) / 1e3
            *copy_in, begin, end, d2h_end = (self._clock.time(event) for event in self._events[first:])
        except RuntimeError:  # a failed device has no times
            return (*(NEVER,) * 6, *(0.0,) * len(INSIDE))
        times = (*(copy_in or (NEVER, NEVER)), begin, end, end, d2h_end)
        shift = self._clock.settle(self._queued, times[first], d2h_end, time.perf_counter())
        self._events[2] = self._clock.move(self._events[2])
        return (*(moment + shift for moment in times), *idle, between)


class CudaDevice:
    """One NVIDIA GPU."""

    def __init__(self, index: int = 0) -> None:
        torch.cuda.set_device(index)
        self.torch_device = torch.device("cuda", index)
        self._streams: dict[str, CudaStream] = {}
        self._clock: CudaClock | None = None
        self.late = Late()
        self.late.watch_allocations(self._num_allocations)
        kernel_hooks.listen(self.late)
        self.num_cores = torch.cuda.get_device_properties(index).multi_processor_count

    def stream(self, name: str) -> CudaStream:
        if name not in self._streams:
            self._streams[name] = CudaStream(name, self.late)
        return self._streams[name]

    def event(self, name: str) -> CudaEvent:
        return CudaEvent(name)

    def timer(self) -> CudaTimer:
        if self._clock is None:
            self._clock = CudaClock(self.stream(STREAMS[COMPUTE]).inner)
        return CudaTimer(self._clock, [self.stream(name).inner for name in STREAMS], self.late)

    def watch(self) -> AbstractContextManager[None]:
        timer = None if self._clock is None else self._clock.timer
        return nullcontext() if timer is None else timer.watch.on()

    def as_launch(self, fn: Callable[P, T]) -> Callable[P, T]:
        def launched(*args: P.args, **kwargs: P.kwargs) -> T:
            timer = None if self._clock is None else self._clock.timer
            with nullcontext() if timer is None else timer.watch.piece():
                return fn(*args, **kwargs)

        return launched

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype, *, host: bool = False) -> Buffer:
        if host:
            return Buffer(name, torch.zeros(tuple(shape), dtype=dtype, pin_memory=True), host=True)
        tensor = torch.zeros(tuple(shape), dtype=dtype, device=self.torch_device)
        torch.cuda.synchronize()  # zeroed on the default stream, used on ours
        return Buffer(name, tensor, host=False)

    def touch(self, label: str, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> None:
        pass

    def release(self, label: str, buffers: Sequence[Buffer]) -> None:
        pass

    def kv_budget(self, dry_run: Callable[[], None]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        dry_run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - held
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0] - 2 * peak - RESERVE_BYTES)

    def read_rate(self) -> float:
        """Bytes a second that plain reads of device memory reach: the best of a few sums over many times the cache."""
        many = torch.ones(2**31, dtype=torch.float16, device=self.torch_device)
        times: list[float] = []
        for _ in range(8):
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            many.view(torch.int32).amax()
            ended.record()
            torch.cuda.synchronize()
            times.append(began.elapsed_time(ended) / 1e3)
        return float(many.numel() * many.itemsize / min(times))

    def memory_held(self) -> int:
        return most_memory()

    def _num_allocations(self) -> int:
        """How often torch took memory from the device so far."""
        return int(torch.cuda.memory_stats_as_nested_dict(self.torch_device).get("num_device_alloc", 0))

    def close(self) -> None:
        kernel_hooks.forget(self.late)
        torch.cuda.synchronize()


def is_available() -> bool:
    """Whether this machine has a GPU that torch can use."""
    return torch.cuda.is_available()


def device_count() -> int:
    """GPUs that this process sees."""
    return torch.cuda.device_count()


def most_memory() -> int:
    """Most bytes in use, since the start or the last `release_memory`."""
    return int(torch.cuda.max_memory_allocated())


def memory_in_use() -> int:
    """Bytes of device memory that all processes together hold, now."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def replay_s(body: Callable[[], object]) -> float:
    """Seconds of device time for the work that `body` queues: the best of a few replays as a captured graph."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        body()
    times: list[float] = []
    for _ in range(REPLAYS):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return min(times[1:])  # the first one also loads the graph


def release_memory() -> None:
    """Return the allocator's cached memory to the device, and restart the peak count."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
