"""The capture of one CUDA graph, its instantiation, and what the captures of an engine cost: time and memory, each with
a limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

BUDGET_S = 120.0  # for all captures, once kernels are compiled; what is left over then stays without a graph
BUDGET_BYTES = 3 * 2**30  # besides the largest step's, for which memory was set aside


@dataclass(slots=True)
class CaptureCost:
    """The cost of capturing graphs, with the kernels compiled for it and before it."""

    num_wanted: int  # shapes
    num_shapes: int = 0
    num_kernels: int = 0  # found in a rehearsal, compiled or taken from the cache
    num_missed: int = 0  # of others, how often one was compiled, found or loaded during the captures
    seconds: float = 0.0
    memory_bytes: int = 0
    largest_bytes: int = 0  # of these, the first shape's: the others fit into its memory
    began_s: float = field(default_factory=time.perf_counter)
    captures_began_s: float = 0.0

    def begin_captures(self) -> None:
        """The budget counts from here: on few cores, compiling alone may take longer."""
        self.captures_began_s = time.perf_counter()

    def add(self, memory_bytes: int) -> None:
        """One more shape is captured, and all together take so much memory."""
        self.num_shapes += 1
        self.memory_bytes = memory_bytes
        if self.num_shapes == 1:
            self.largest_bytes = memory_bytes

    def within_budget(self) -> bool:
        now = time.perf_counter()
        self.seconds = now - self.began_s
        return now - self.captures_began_s < BUDGET_S and self.memory_bytes - self.largest_bytes < BUDGET_BYTES

    def __str__(self) -> str:
        return (
            f"{self.num_kernels} kernels made ready and {self.num_shapes} of {self.num_wanted} shapes captured in "
            f"{self.seconds:.1f} s, {self.memory_bytes / 2**30:.2f} GiB"
        )


class Instantiation:
    """Makes captured graphs ready for replays, in the background while others are captured: the driver takes 3 to 5 ms
    for a step with chunks.
    """

    def __init__(self) -> None:
        device = (torch.cuda.set_device, (torch.cuda.current_device(),)) if torch.cuda.is_available() else ()
        self._thread = ThreadPoolExecutor(1, "gapless-graphs", *device)
        self._under_way: list[Future[None]] = []

    def of(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.CUDAGraph:
        """The same graph; it may be replayed when the block has ended."""
        self._under_way.append(self._thread.submit(graph.instantiate))
        return graph

    def __enter__(self) -> Instantiation:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._thread.shutdown(cancel_futures=error is not None)
        if error is None:
            for each in self._under_way:
                each.result()


def record(body: Callable[[], None], pool: Any, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of what `body` launches, not instantiated yet. Other threads may use the device meanwhile.

    Not by `torch.cuda.graph`, which collects garbage and empties the allocator's cache before each capture.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            body()
        except BaseException:
            with suppress(RuntimeError):  # CUDA refuses a capture that was cut off, and would hide the reason
                graph.capture_end()
            raise
        graph.capture_end()
    return graph
