"""A replica that has called, as the pool sees it: its engines, one after the other, and the supervisor of them."""

from __future__ import annotations

import asyncio

from gapless.config import EngineOptions
from gapless.distributed.link import RemoteEngine
from gapless.server.doorbell import Doorbell
from gapless.server.engine_child import EngineLink, OnStarted
from gapless.server.supervisor import Supervisor
from gapless.server.watchdog import Watchdog

CALL_AGAIN_S = 30.0  # for a replica to call again after its engine died


class ReplicaGone(Exception):
    """The replica will not call again."""


class PoolMember:
    """One replica. The pool tells it of calls and runs its supervisor."""

    def __init__(
        self,
        name: str,
        node: str,
        engine: EngineOptions,
        watchdog: Watchdog,
        doorbell: Doorbell,
        on_started: OnStarted,
    ) -> None:
        """on_started: told of each request that starts, besides the supervisor."""
        self.name, self.node = name, node
        self.is_leaving = False
        self.supervisor = Supervisor(engine, watchdog, self._next_engine, doorbell)
        self._on_started = on_started
        self._calls: asyncio.Queue[RemoteEngine] = asyncio.Queue()
        self._latest: RemoteEngine | None = None

    def take(self, engine: RemoteEngine) -> None:
        """It has called, with a new engine."""
        self._calls.put_nowait(engine)

    async def _next_engine(self, on_started: OnStarted) -> EngineLink:
        """Raises ReplicaGone if it does not call any more.

        A replica may notice a broken connection before this side does, so its next call may be here already.
        """
        if self._latest is not None and self._calls.empty() and (self.is_leaving or not self._latest.may_call_again):
            raise ReplicaGone
        try:
            async with asyncio.timeout(CALL_AGAIN_S):
                self._latest = engine = await self._calls.get()
        except TimeoutError:
            raise ReplicaGone from None

        def started(id: int) -> None:
            on_started(id)
            self._on_started(id)

        engine.listen(started)
        return engine
