"""The capture of one CUDA graph, and what the captures of an engine cost: time and memory, each with a limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

BUDGET_S = 120.0  # for all captures, once kernels are compiled; what is left over then stays without a graph
BUDGET_BYTES = 3 * 2**30  # besides the largest step's, for which memory was set aside


@dataclass(slots=True)
class CaptureCost:
    """The cost of capturing graphs, with the kernels compiled for it and before it."""

    num_wanted: int
    num_graphs: int = 0
    num_kernels: int = 0  # found in a rehearsal, compiled or taken from the cache
    seconds: float = 0.0
    memory_bytes: int = 0
    largest_bytes: int = 0  # of these, the first graph's: the others fit into its memory
    began_s: float = field(default_factory=time.perf_counter)
    captures_began_s: float = 0.0

    def begin_captures(self) -> None:
        """The budget counts from here: on few cores, compiling alone may take longer."""
        self.captures_began_s = time.perf_counter()

    def add(self, memory_bytes: int) -> None:
        """One more graph is captured, and all together take so much memory."""
        self.num_graphs += 1
        self.memory_bytes = memory_bytes
        if self.num_graphs == 1:
            self.largest_bytes = memory_bytes

    def within_budget(self) -> bool:
        now = time.perf_counter()
        self.seconds = now - self.began_s
        return now - self.captures_began_s < BUDGET_S and self.memory_bytes - self.largest_bytes < BUDGET_BYTES

    def __str__(self) -> str:
        return (
            f"{self.num_kernels} kernels made ready and {self.num_graphs} of {self.num_wanted} graphs captured in "
            f"{self.seconds:.1f} s, {self.memory_bytes / 2**30:.2f} GiB"
        )


def record(body: Callable[[], None], pool: Any, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of what `body` launches. Other threads may use the device meanwhile.

    Not by `torch.cuda.graph`, which collects garbage and empties the allocator's cache before each capture.
    """
    graph = torch.cuda.CUDAGraph()
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
