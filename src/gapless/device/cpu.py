"""Streams and events on a CPU, with the semantics of CUDA's, so that the whole pipeline can be tested anywhere.

Owns the worker threads. `CpuDevice()` gives each stream a thread. `CpuDevice(seed=n)` has no threads: it runs queued
work on the caller's thread, in an order drawn from the seed among those that the events allow. Knows nothing of batches
or models.
"""

from __future__ import annotations

import math
import os
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch

from gapless.device.base import INSIDE, MASKS, NEVER, Buffer, Event, P, Stream, T
from gapless.device.late import Late
from gapless.errors import CapacityError

KV_SHARE = 1 / 3  # of the free memory
NO_IDLE = (0.0,) * len(INSIDE)
KV_CAP_BYTES = 8 * 2**30  # by default; a user may set more


class Fence:
    """One recording of an event. An event that is recorded again gets a new fence; old waiters keep the old one."""

    __slots__ = ("_gate", "done", "error")

    def __init__(self) -> None:
        self.done = False
        self.error: BaseException | None = None
        self._gate = threading.Lock()  # held until the fence is passed; to make an Event takes 2 µs more
        self._gate.acquire()

    def pass_(self, error: BaseException | None) -> None:
        self.error = error
        self.done = True
        self._gate.release()

    def block(self) -> None:
        if not self.done:
            with self._gate:
                pass


class CpuEvent:
    """An event: its latest fence, and how the host waits for it."""

    def __init__(self, name: str, wait: Callable[[Fence], None]) -> None:
        self.name = name
        self.fence: Fence | None = None
        self._wait = wait

    def synchronize(self) -> None:
        fence = self.fence
        if fence is None:
            return
        self._wait(fence)
        if fence.error is not None:
            raise fence.error

    def query(self) -> bool:
        return self.fence is None or self.fence.done


class Op:
    """One entry of a stream's queue. `after` is the fence that a wait waits for."""

    __slots__ = ("after", "fn")

    def __init__(self, fn: Callable[[], None], after: Fence | None = None) -> None:
        self.fn = fn
        self.after = after


class CpuStream:
    """A queue of operations. After one raises, the rest are skipped up to the next record, which carries the error."""

    def __init__(self, name: str, submit: Callable[[CpuStream, Op], None]) -> None:
        self.name = name
        self._submit = submit
        self._error: BaseException | None = None

    def run(
        self, fn: Callable[[], None], label: str, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        self._submit(self, Op(lambda: self._guard(fn)))

    def record(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        fence = event.fence = Fence()
        self._submit(self, Op(lambda: self._pass(fence)))

    def wait(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        fence = event.fence
        if fence is not None:
            self._submit(self, Op(lambda: self._inherit(fence), after=fence))

    def pause(self, delay_s: float) -> None:
        self._submit(self, Op(lambda: time.sleep(delay_s)))

    def _guard(self, fn: Callable[[], None]) -> None:
        if self._error is not None:
            return
        try:
            fn()
        except BaseException as error:
            self._error = error

    def _pass(self, fence: Fence) -> None:
        error, self._error = self._error, None
        fence.pass_(error)

    def _inherit(self, fence: Fence) -> None:
        self._error = self._error or fence.error


class CpuTimer:
    """Reads the clock on the thread that runs the work. A step is one call there, or two, between which it idles."""

    def __init__(self) -> None:
        self._times = [NEVER] * 8

    def around(self, part: int, fn: Callable[[], None]) -> Callable[[], None]:
        times = self._times

        def timed() -> None:
            times[2 * part] = time.perf_counter()
            try:
                fn()
            finally:
                times[2 * part + 1] = time.perf_counter()

        return timed

    def read(self) -> tuple[float, ...]:
        *times, sampling, end = self._times
        self._times[:] = [NEVER] * 8
        if math.isnan(end):
            return (*times, *NO_IDLE)
        idle, times[3] = sampling - times[3], end
        return (*times, *NO_IDLE[:MASKS], idle)


class Driver:
    """Runs the operations, and makes the host wait. This one has a thread for each stream."""

    def __init__(self) -> None:
        self._queues: dict[CpuStream, queue.SimpleQueue[Op | None]] = {}
        self._threads: list[threading.Thread] = []

    def add(self, stream: CpuStream) -> None:
        ops: queue.SimpleQueue[Op | None] = queue.SimpleQueue()
        self._queues[stream] = ops
        thread = threading.Thread(target=_work, args=(ops,), name=f"gapless-{stream.name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def submit(self, stream: CpuStream, op: Op) -> None:
        self._queues[stream].put(op)

    def wait(self, fence: Fence) -> None:
        fence.block()

    def close(self) -> None:
        for ops in self._queues.values():
            ops.put(None)
        for thread in self._threads:
            thread.join()


def _work(ops: queue.SimpleQueue[Op | None]) -> None:
    while (op := ops.get()) is not None:
        if op.after is not None:
            op.after.block()
        op.fn()
        del op  # do not keep the last step's buffers alive while idle


class SeededDriver(Driver):
    """Runs the operations on the host's own thread, as late and as mixed up as the events allow."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._ops: dict[CpuStream, deque[Op]] = {}

    def add(self, stream: CpuStream) -> None:
        self._ops[stream] = deque()

    def submit(self, stream: CpuStream, op: Op) -> None:
        self._ops[stream].append(op)
        while self._random.random() < 0.4 and self._run_one():
            pass

    def wait(self, fence: Fence) -> None:
        while not fence.done:
            assert self._run_one(), "deadlock: no stream can run, and the host waits"

    def close(self) -> None:
        while self._run_one():
            pass

    def _run_one(self) -> bool:
        ready = [ops for ops in self._ops.values() if ops and (ops[0].after is None or ops[0].after.done)]
        if not ready:
            return False
        self._random.choice(ready).popleft().fn()
        return True


class InlineDriver(Driver):
    """Runs each operation at once, on the host's thread, without overlap or overhead. For measuring the host."""

    def add(self, stream: CpuStream) -> None:
        pass

    def submit(self, stream: CpuStream, op: Op) -> None:
        op.fn()

    def wait(self, fence: Fence) -> None:
        assert fence.done


class CpuDevice:
    """Streams on a CPU. Without a driver or a seed, each stream gets a thread."""

    def __init__(self, seed: int | None = None, driver: Driver | None = None) -> None:
        self.torch_device = torch.device("cpu")
        self.num_cores = torch.get_num_threads()
        self.late = Late()
        self._driver = driver or (Driver() if seed is None else SeededDriver(seed))
        self._streams: dict[str, CpuStream] = {}

    def stream(self, name: str) -> Stream:
        if name not in self._streams:
            stream = self._streams[name] = CpuStream(name, self._driver.submit)
            self._driver.add(stream)
        return self._streams[name]

    def event(self, name: str) -> CpuEvent:
        return CpuEvent(name, self._driver.wait)

    def timer(self) -> CpuTimer:
        return CpuTimer()

    def watch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def as_launch(self, fn: Callable[P, T]) -> Callable[P, T]:
        return fn

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype, *, host: bool = False) -> Buffer:
        size = math.prod(shape) * dtype.itemsize
        try:
            pages = np.zeros(size, np.uint8)  # unlike torch's: no memory until it is touched
        except MemoryError:
            raise CapacityError(f"no memory for {name}: it takes {size} bytes, {available_memory()} are free") from None
        return Buffer(name, torch.from_numpy(pages).view(dtype).view(tuple(shape)), host=host)

    def touch(self, label: str, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> None:
        pass

    def release(self, label: str, buffers: Sequence[Buffer]) -> None:
        pass

    def kv_budget(self, dry_run: Callable[[], None]) -> int:
        return min(int(available_memory() * KV_SHARE), KV_CAP_BYTES)

    def memory_held(self) -> int:
        return 0

    def close(self) -> None:
        self._driver.close()


def available_memory() -> int:
    """Bytes available without swapping; half of all memory where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    except (OSError, StopIteration):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:  # a container's own limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):
        return free
    return min(free, max(limit - used, 0))
