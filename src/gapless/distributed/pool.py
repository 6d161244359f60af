"""The engines of a server that has replicas: which there are, and which of them has which request.

Owns the flights that no replica has yet. Each replica has a supervisor, which starts its requests again if its engine
crashes. A request moves when its replica is gone or is asked to leave: the next replica gets the prompt and the tokens
so far, which is what an engine gets after a crash. So a move is exact where a restart is. Knows no text and no HTTP,
and nothing of Ray: something else starts and stops replicas, and they call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from gapless.config import EngineOptions
from gapless.core.params import SamplingParams
from gapless.core.structured import Structured
from gapless.distributed.autoscaler import Autoscaler
from gapless.distributed.cluster import NodeVersions
from gapless.distributed.home import Home
from gapless.distributed.link import Hello, RemoteEngine
from gapless.distributed.pool_member import PoolMember, ReplicaGone
from gapless.distributed.router import Router
from gapless.distributed.upkeep import PoolLoad, ReplicaKeeper, Upkeep
from gapless.errors import NoReplica
from gapless.server.channel import ParentChannel
from gapless.server.doorbell import Doorbell
from gapless.server.messages import GrammarChecked, Over, Ready
from gapless.server.options import ServerOptions
from gapless.server.roster import Flight, FlightMaker
from gapless.server.supervisor import EngineFailed, Supervisor
from gapless.server.totals import EngineTotals
from gapless.server.watchdog import Watchdog

log = logging.getLogger(__name__)
MOST_TRACES = 64
GONE = "gone"  # the name under which replicas that are no more are counted together
DRAIN_POLL_S = 0.02


class EnginePool:
    """The engines as the API sees them. Replicas join it by calling its home."""

    def __init__(
        self,
        engine: EngineOptions,
        options: ServerOptions,
        keeper: ReplicaKeeper,
        scaler: Autoscaler,
        host: str,
        versions: NodeVersions,
    ) -> None:
        """host: an address of this machine that replicas reach."""
        self._engine, self._options = engine, options
        self._upkeep = Upkeep(keeper, scaler)
        self._home = Home(host, versions, self._take_call, self._fail)
        self._doorbell = Doorbell()
        self._flights = FlightMaker(engine.seed)
        self._waiting: dict[int, Flight] = {}  # for a replica, in order of arrival
        self._where: dict[int, PoolMember] = {}  # of each flight that a replica has
        self._sessions: dict[int, str] = {}  # of each flight that has one
        self._members: dict[str, PoolMember] = {}  # by the name that the replica gives
        self._num_members = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._router = Router()
        self._gone = EngineTotals()
        self.traces: deque[tuple[str, bytes]] = deque(maxlen=MOST_TRACES)  # of engines that ended, where wanted
        self._closing = False
        self._failure: asyncio.Future[None] | None = None  # or the end
        self.on_over: list[Callable[[Flight], None]] = [self._forget]
        self.info: Ready | None = None
        self.num_restarts = 0

    # -- for the API -------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return any(member.supervisor.is_ready for member in self._members.values())

    @property
    def in_quarantine(self) -> bool:
        """Whether every engine that runs has suspects."""
        ready = [one.supervisor.in_quarantine for one in self._members.values() if one.supervisor.is_ready]
        return bool(ready) and all(ready)

    @property
    def num_rows(self) -> int:
        """Of the engines that run; of one, while none does."""
        found = sum(one.supervisor.num_rows for one in self._members.values() if one.supervisor.is_ready)
        return found or (self.info.num_rows if self.info is not None else 0)

    @property
    def loaded_share(self) -> float:
        return max((member.supervisor.loaded_share for member in self._members.values()), default=0.0)

    def unfinished(self) -> list[Flight]:
        return [
            *self._waiting.values(),
            *(flight for one in self._members.values() for flight in one.supervisor.roster),
        ]

    def members(self) -> Mapping[str, Supervisor]:
        return {member.name: member.supervisor for member in self._members.values()}

    def totals(self) -> Mapping[str, EngineTotals]:
        return {GONE: self._gone} | {one.name: one.supervisor.counters for one in self._members.values()}

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, changed: asyncio.Event, session: str | None = None
    ) -> Flight:
        """A new flight. It is sent at once, or when there is a replica for it."""
        flight = self._flights.make(prompt, params, changed)
        if session is not None:
            self._sessions[flight.id] = session
        self._send(flight)
        return flight

    def abort(self, flight: Flight, reason: str = "abort") -> None:
        """End a flight now."""
        if flight.over is not None:
            return
        if (member := self._where.get(flight.id)) is not None:
            member.supervisor.abort(flight, reason)
        else:
            self._end(flight, reason)

    async def ping(self, timeout_s: float) -> bool:
        """Whether any engine's loop answers."""
        asked = [member.supervisor.ping(timeout_s) for member in self._members.values()]
        return any(await asyncio.gather(*asked))

    async def check_grammar(self, structured: Structured, timeout_s: float) -> GrammarChecked | None:
        """Whether an engine can compile it; None if it did not answer."""
        ready = [member.supervisor for member in self._members.values() if member.supervisor.is_ready]
        return await ready[0].check_grammar(structured, timeout_s) if ready else None

    # -- where flights go --------------------------------------------------------------------------------------------

    def _send(self, flight: Flight) -> None:
        """To the replica that the router chooses, or to those that wait for one."""
        tokens = [*flight.prompt, *flight.tokens]
        try:
            route = self._router.route(str(flight.id), tokens, self._sessions.get(flight.id))
        except NoReplica:
            self._waiting[flight.id] = flight
            return
        member = next(one for one in self._members.values() if one.name == route.replica)
        self._where[flight.id] = member
        member.supervisor.adopt(flight)

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for flight in waiting.values():
            self._send(flight)

    def _move(self, member: PoolMember, *, everybody: bool) -> None:
        """Its flights go on elsewhere."""
        for flight in member.supervisor.release(everybody=everybody):
            self._where.pop(flight.id, None)
            self._router.finished(str(flight.id))
            self._send(flight)

    def _end(self, flight: Flight, reason: str) -> None:
        """A flight that no replica has is over."""
        del self._waiting[flight.id]
        flight.over = Over(flight.id, reason)
        flight.over_s = time.monotonic()
        flight.changed.set()
        self._tell_over(flight)

    def _tell_over(self, flight: Flight) -> None:
        for callback in self.on_over:
            callback(flight)

    def _forget(self, flight: Flight) -> None:
        self._where.pop(flight.id, None)
        self._sessions.pop(flight.id, None)
        self._router.finished(str(flight.id), [*flight.prompt, *flight.tokens])

    # -- replicas ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until closed. Raises EngineFailed when there never can be an engine."""
        self._failure = asyncio.get_running_loop().create_future()
        upkeep = asyncio.create_task(self._upkeep.run(await self._home.open(), self._load))
        await asyncio.wait((self._failure, upkeep), return_when=asyncio.FIRST_COMPLETED)
        upkeep.cancel()
        for task in (self._failure, upkeep):
            if task.done():
                task.result()

    def _load(self) -> PoolLoad:
        return PoolLoad(len(self.unfinished()), self.info.num_rows if self.info is not None else 0)

    def restart(self) -> None:
        """Replace all replicas, one after the other."""
        self._upkeep.restart()

    async def close(self) -> None:
        """End all flights and all replicas."""
        if self._closing:
            return
        self._closing = True
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(None)  # nothing scales or replaces replicas that are about to end
        for flight in self.unfinished():
            self.abort(flight)
        self._home.close()
        await asyncio.gather(*(self._take_trace(member) for member in self._members.values()))
        await asyncio.gather(*(member.supervisor.close() for member in self._members.values()))
        await self._upkeep.stop()

    def kill(self) -> None:
        for member in self._members.values():
            member.supervisor.kill()

    def _fail(self, reason: str) -> None:
        """A replica cannot serve. If none ever did, the server cannot."""
        log.error("a replica cannot serve: %s", reason)
        if self.info is None and self._failure is not None and not self._failure.done():
            self._failure.set_exception(EngineFailed(reason))

    def _take_call(self, channel: ParentChannel[Any], hello: Hello) -> None:
        if self._closing:
            channel.close()
            return
        member = self._members.get(hello.replica) or self._join(hello)
        member.take(RemoteEngine(channel, hello, lambda: self._drain(member)))

    def _join(self, hello: Hello) -> PoolMember:
        self._num_members += 1
        name = str(self._num_members)
        watchdog = Watchdog(self._options.load_timeout, self._options.step_timeout)
        started = lambda id: self._router.started(str(id))  # noqa: E731
        member = PoolMember(name, hello.node, self._engine, watchdog, self._doorbell, started)
        self._members[hello.replica] = member
        supervisor = member.supervisor
        supervisor.on_over.append(self._tell_over)
        supervisor.on_open.append(lambda: self._admit(member))
        supervisor.on_crash.append(lambda: self._lose_engine(member))
        log.info("replica %s calls from node %s", name, hello.node, extra={"replica": name})
        self._start(self._run_member(hello.replica, member))
        return member

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """In the background, for as long as it takes."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_member(self, replica: str, member: PoolMember) -> None:
        """From its first call to its end."""
        try:
            await member.supervisor.run()
        except ReplicaGone:
            pass
        except EngineFailed as error:
            self._fail(f"node {member.node}: {error}")
        except Exception:
            log.exception("replica %s failed", member.name, extra={"replica": member.name})
            member.supervisor.kill()
        del self._members[replica]
        self._router.leave(member.name)
        self._gone.add(member.supervisor.counters)
        log.info("replica %s is gone", member.name, extra={"replica": member.name})
        self._move(member, everybody=True)

    def _admit(self, member: PoolMember) -> None:
        """It takes requests now."""
        self.info = info = member.supervisor.info
        assert info is not None
        if not member.is_leaving:
            self._router.join(member.name, info.num_blocks * info.block_size)
            self._send_waiting()

    def _lose_engine(self, member: PoolMember) -> None:
        """Its engine died. Suspects of a crash stay for their trials; everybody else goes on elsewhere."""
        self.num_restarts += 1
        self._router.leave(member.name)
        self._move(member, everybody=False)

    def _drain(self, member: PoolMember) -> None:
        """It is asked to leave: it finishes what it has, and what takes too long goes on elsewhere."""
        if not member.is_leaving:
            log.info("replica %s leaves", member.name, extra={"replica": member.name})
            member.is_leaving = True
            self._router.drain(member.name)
            self._start(self._finish(member))

    async def _finish(self, member: PoolMember) -> None:
        deadline_s = time.monotonic() + self._options.drain_timeout
        while len(member.supervisor.roster) and time.monotonic() < deadline_s:
            await asyncio.sleep(DRAIN_POLL_S)
        self._move(member, everybody=True)
        await self._take_trace(member)
        member.supervisor.retire()

    async def _take_trace(self, member: PoolMember) -> None:
        if self._engine.trace and (data := await member.supervisor.trace()) is not None:
            self.traces.append((member.name, data))
