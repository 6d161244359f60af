"""Streams and events on an NVIDIA GPU.

Three streams of our own, none of them the default one; host buffers in pinned memory. The host waits for an event
by sleeping, not spinning. Knows nothing of batches or models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from gapless.device.base import Buffer, Event, Stream

RESERVE_BYTES = 6 * 2**30  # for captured graphs, the libraries' workspaces, and what the allocator cannot use


class CudaEvent:
    """A CUDA event without timing; the host sleeps while it waits."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.inner = torch.cuda.Event(blocking=True)

    def synchronize(self) -> None:
        self.inner.synchronize()

    def query(self) -> bool:
        done: bool = self.inner.query()
        return done


class CudaStream:
    """A CUDA stream. With `timed`, pairs of timing events around each `run` say how long it was busy."""

    def __init__(self, name: str, *, timed: bool = False) -> None:
        self.name = name
        self.inner = torch.cuda.Stream()
        self._timed = timed
        self._busy_s = 0.0
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @property
    def busy_s(self) -> float:
        while self._pairs and self._pairs[0][1].query():
            began, ended = self._pairs.popleft()
            self._busy_s += began.elapsed_time(ended) / 1e3
        return self._busy_s

    def run(
        self, fn: Callable[[], None], label: str, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        with torch.cuda.stream(self.inner):
            if not self._timed:
                fn()
                return
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record(self.inner)
            fn()
            ended.record(self.inner)
            self._pairs.append((began, ended))
        if len(self._pairs) > 256:
            _ = self.busy_s

    def record(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.inner.record(self.inner)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.inner.wait_event(event.inner)


class CudaDevice:
    """One NVIDIA GPU."""

    def __init__(self, index: int = 0) -> None:
        torch.cuda.set_device(index)
        self.torch_device = torch.device("cuda", index)
        self.h2d: Stream = CudaStream("h2d")
        self.compute: Stream = CudaStream("compute", timed=True)
        self.d2h: Stream = CudaStream("d2h")
        self.num_cores = torch.cuda.get_device_properties(index).multi_processor_count

    def event(self, name: str) -> CudaEvent:
        return CudaEvent(name)

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype, *, host: bool = False) -> Buffer:
        if host:
            return Buffer(name, torch.zeros(tuple(shape), dtype=dtype, pin_memory=True), host=True)
        tensor = torch.zeros(tuple(shape), dtype=dtype, device=self.torch_device)
        torch.cuda.synchronize()  # zeroed on the default stream, used on ours
        return Buffer(name, tensor, host=False)

    def touch(self, label: str, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> None:
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

    def close(self) -> None:
        torch.cuda.synchronize()


def is_available() -> bool:
    """Whether this machine has a GPU that torch can use."""
    return torch.cuda.is_available()


def most_memory() -> int:
    """Bytes in use at most, since the start or the last `release_memory`."""
    return int(torch.cuda.max_memory_allocated())


def release_memory() -> None:
    """Give back what the allocator keeps, and count the most anew."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
