"""One engine in a process of a Ray cluster: an actor that completes pieces of a run.

Several pieces are with the engine at the same time, each on a thread of the actor. While the last rows of a piece run,
the rows of the next one are tokenized and submitted, so the device does not drain between pieces.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gapless.distributed.cluster import NodeVersions, here
from gapless.errors import ConfigError, GaplessError
from gapless.formats.base import BadLine, Dialect, Line
from gapless.garbage import collect_rarely
from gapless.line_work import LineWork
from gapless.llm import LLM
from gapless.part_file import Record

GATHER_S = 0.3  # how long results wait for others, to travel together
LineResult = tuple[Record, int]
LineResults = list[LineResult]


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What a replica says of itself when it has loaded the model."""

    num_rows: int
    node: str


class Replica:
    """The actor. Its methods run on several threads."""

    def load(
        self, versions: NodeVersions, options: Mapping[str, Any], dialect: Dialect, sampling: Mapping[str, Any]
    ) -> ReplicaFacts:
        """Raises ConfigError for everything that the user can do something about."""
        import ray

        node = ray.util.get_node_ip_address()
        if difference := versions.difference(here()):
            raise ConfigError(f"node {node} has {difference}; install the same versions on all nodes")
        try:
            self._llm = LLM(**options)
        except GaplessError as error:
            raise ConfigError(f"node {node}: {error}") from None
        self._dialect, self._sampling = dialect, sampling
        collect_rarely()
        return ReplicaFacts(self._llm.engine.resolved.limits.num_rows, node)

    def complete(self, lines: Sequence[Line | BadLine]) -> Iterator[LineResults]:
        """The results of lines and the tokens that each took, in any order, a few at a time as they come."""
        found: queue.SimpleQueue[LineResult | None] = queue.SimpleQueue()
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(self._complete, lines, found)
            while batch := _take(found):
                yield batch
            done.result()

    def _complete(self, lines: Sequence[Line | BadLine], found: queue.SimpleQueue[LineResult | None]) -> None:
        try:
            work = LineWork(self._llm, self._dialect, self._sampling, {})
            work.do(lines, lambda line, record, num_tokens: found.put((record, num_tokens)))
        finally:
            found.put(None)


def _take(found: queue.SimpleQueue[LineResult | None]) -> LineResults:
    """What has come within a moment after the first; nothing at the end."""
    batch: LineResults = []
    deadline = math.inf
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            result = found.get(timeout=None if deadline == math.inf else left_s)
        except queue.Empty:
            break
        if result is None:
            found.put(None)  # for the next call
            break
        batch.append(result)
        deadline = min(deadline, time.monotonic() + GATHER_S)
    return batch
