"""Keeps as many replicas as the load needs, and replaces them when it is told to.

Knows what can start and stop replicas, and no replica itself: they call the pool when they are there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gapless.distributed.autoscaler import Autoscaler
from gapless.distributed.home import HomeAddress
from gapless.server.supervisor import EngineFailed

KEEP_S = 0.5  # between two looks at the load
log = logging.getLogger(__name__)


class ReplicaKeeper(Protocol):
    """Starts and stops replicas. Methods block; they are called on a thread."""

    def start(self, address: HomeAddress, num_replicas: int) -> None: ...

    def scale(self, num_replicas: int) -> None: ...

    def restart(self, num_replicas: int) -> None: ...  # replace all, one after the other

    def problem(self) -> str | None: ...  # why there cannot be any

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """What decides how many replicas there are to be."""

    num_unfinished: int
    num_rows: int  # of one engine; 0 until the first one was ready


class Upkeep:
    """The number of replicas."""

    def __init__(self, keeper: ReplicaKeeper, scaler: Autoscaler) -> None:
        self._keeper, self._scaler = keeper, scaler
        self.num_wanted = scaler.least
        self._restart_due = False
        self._is_started = False

    def restart(self) -> None:
        """Replace all replicas, one after the other."""
        log.info("all replicas are replaced, one after the other")
        self._restart_due = True

    async def run(self, address: HomeAddress, load: Callable[[], PoolLoad]) -> None:
        """Until cancelled. Raises EngineFailed when there never can be a replica."""
        self._is_started = True
        await asyncio.to_thread(self._keeper.start, address, self.num_wanted)
        while True:
            await asyncio.sleep(KEEP_S)
            try:
                await self._look(load())
            except EngineFailed:
                raise
            except Exception as error:  # the cluster is away; the replicas that are there serve on
                log.error("replicas cannot be kept, which is tried again: %s", " ".join(str(error).split())[:300])

    async def _look(self, found: PoolLoad) -> None:
        if not found.num_rows and (problem := await asyncio.to_thread(self._keeper.problem)) is not None:
            raise EngineFailed(problem)
        if self._restart_due:
            self._restart_due = False
            try:
                await asyncio.to_thread(self._keeper.restart, self.num_wanted)
            except Exception:
                self._restart_due = True
                raise
        target = self._scaler.target(time.monotonic(), found.num_unfinished, found.num_rows)
        if target != self.num_wanted:
            log.info("replicas: %d instead of %d", target, self.num_wanted)
            await asyncio.to_thread(self._keeper.scale, target)
            self.num_wanted = target

    async def stop(self) -> None:
        """End the replicas."""
        if self._is_started:
            await asyncio.to_thread(self._keeper.stop)
