"""Replicas without Ray: relays on threads of this process, each with a stub engine of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from stub_engine import continuation

from gapless.config import EngineOptions
from gapless.core.params import SamplingParams
from gapless.distributed.autoscaler import Autoscaler
from gapless.distributed.cluster import NodeVersions
from gapless.distributed.home import HomeAddress
from gapless.distributed.pool import EnginePool
from gapless.distributed.serve_replica import EngineRelay
from gapless.server.options import ServerOptions
from gapless.server.roster import Flight

STUB = (sys.executable, str(Path(__file__).parent / "stub_engine.py"))
VERSIONS = NodeVersions("1", "2", "3")
WAIT_S = 30.0


class LocalReplicas:
    """Starts and stops replicas as Ray Serve does: a replacement comes before the next one goes."""

    def __init__(self) -> None:
        self.relays: dict[str, EngineRelay] = {}
        self.address: HomeAddress | None = None
        self._numbers = itertools.count()

    def start(self, address: HomeAddress, num_replicas: int) -> None:
        self.address = address
        self.scale(num_replicas)

    def add(self) -> EngineRelay:
        assert self.address is not None
        name = f"r{next(self._numbers)}"
        self.relays[name] = relay = EngineRelay(self.address, name, "here", STUB, VERSIONS)
        return relay

    def scale(self, num_replicas: int) -> None:
        while len(self.relays) < num_replicas:
            self.add()
        while len(self.relays) > num_replicas:
            self.relays.pop(next(iter(self.relays))).leave(WAIT_S)

    def restart(self, num_replicas: int) -> None:
        for name in list(self.relays):
            self.relays.pop(name).leave(WAIT_S)
            assert self.add().told.wait(WAIT_S)

    def problem(self) -> str | None:
        return None

    def stop(self) -> None:
        self.scale(0)


@contextlib.asynccontextmanager
async def pool_of(num_replicas: int, scaler: Autoscaler | None = None, **options: Any) -> AsyncIterator[Any]:
    """A pool whose replicas are ready, and what keeps them."""
    keeper = LocalReplicas()
    scaler = scaler or Autoscaler(num_replicas, num_replicas)
    pool = EnginePool(EngineOptions(), ServerOptions(**options), keeper, scaler, "127.0.0.1", VERSIONS)
    running = asyncio.create_task(pool.run())
    try:
        await until(lambda: sum(one.is_ready for one in pool.members().values()) == num_replicas)
        yield pool, keeper
    finally:
        await pool.close()
        async with asyncio.timeout(WAIT_S):
            await running


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(0.005)


def submit(pool: EnginePool, number: int, count: int, session: str | None = None) -> Flight:
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    return pool.submit([number % 90, 5, number % 7], params, asyncio.Event(), session)


async def check_all(flights: list[Flight]) -> None:
    """Each has the tokens of an undisturbed run, none lost and none doubled."""
    await until(lambda: all(flight.over is not None for flight in flights))
    for flight in flights:
        assert flight.over is not None
        assert flight.over.reason == "length", flight.over
        assert list(flight.tokens) == continuation(flight.prompt, flight.params.max_tokens)


def kill(pool: EnginePool, name: str) -> None:
    """End the engine of a replica from outside."""
    pid = pool.members()[name].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
