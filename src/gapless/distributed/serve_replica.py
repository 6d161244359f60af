"""A replica of a server: one engine process on a node of the cluster, and its connection to the API process.

Ray Serve starts it, watches it, and asks it to leave. It calls the API process and passes messages on between it and
the engine. When the engine dies, the replica says how, and calls again with a new one. When it cannot reach the API
process any more, it ends. If that process is gone for good, as the cluster knows, the replica takes the deployment down
too: nobody would ever use it again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence

from gapless.distributed.cluster import NodeVersions, here, is_job_over
from gapless.distributed.home import HomeAddress, hello_of
from gapless.distributed.link import STREAM_LIMIT, EngineDied, Leaving, Started, send_at_once
from gapless.server.channel import Disconnected, ParentChannel
from gapless.server.engine_child import EngineChild
from gapless.server.messages import LoadFailed, Ready, ToEngine, WireMessage
from gapless.server.supervisor import ENGINE_COMMAND

REDIAL_S = 0.2
HOME_S = 20.0  # without an answer of the API process: then it is gone, or this node is cut off from it
log = logging.getLogger(__name__)


class EngineRelay:
    """Engines, one after the other, each with a connection of its own. Runs on a thread with its own event loop."""

    def __init__(
        self, address: HomeAddress, name: str, node: str, command: Sequence[str], versions: NodeVersions
    ) -> None:
        self._address, self._versions = address, versions
        self._name, self._node = name, node
        self._command = tuple(command)
        self._loop = asyncio.new_event_loop()
        self._home: ParentChannel[ToEngine] | None = None
        self._is_leaving = False
        self.is_orphan = False  # the API process cannot be reached
        self.failure = ""  # why the engine could not be loaded, or may not serve
        self.told = threading.Event()  # ready for the first time, or failed
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gapless-relay", daemon=True)
        self._thread.start()

    def leave(self, timeout_s: float) -> None:
        """Tell the API process, and wait until it is done with this replica."""
        self._loop.call_soon_threadsafe(self._tell_leaving)
        self.is_over.wait(timeout_s)

    def vanish(self) -> None:
        """End at once and say nothing, as a node that loses power. For tests, on the thread of the relay."""
        self._is_leaving = True
        if self._home is not None:
            self._home.close()

    def _tell_leaving(self) -> None:
        self._is_leaving = True
        if self._home is not None:
            self._home.send(Leaving())

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._live())
        except Exception as error:
            log.exception("the relay failed")
            self.failure = self.failure or str(error)
        finally:
            self.is_over.set()
            self.told.set()

    async def _live(self) -> None:
        while not self._is_leaving:
            reader, writer = await self._call()
            send_at_once(writer)
            self._home = ParentChannel(reader, writer, ToEngine)
            try:
                if not await self._run_engine(self._home):
                    self.failure = "the API process refuses this replica"
                    return
            finally:
                self._home.close()
                self._home = None
            await asyncio.sleep(REDIAL_S)

    async def _call(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the API process. Raises OSError if there is none for a while."""
        started_s = time.monotonic()
        while True:
            try:
                return await asyncio.open_connection(self._address.host, self._address.port, limit=STREAM_LIMIT)
            except OSError:
                if self._is_leaving or time.monotonic() - started_s > HOME_S:
                    self.is_orphan = True
                    raise
            await asyncio.sleep(REDIAL_S)

    async def _run_engine(self, home: ParentChannel[ToEngine]) -> bool:
        """One engine, from start to death; whether the API process said anything to it."""
        child = EngineChild(self._command, lambda id: home.send(Started(id)))
        await child.open()
        home.send(hello_of(self._address, self._name, self._node, self._versions, child.pid))
        up = asyncio.create_task(self._pass_up(child, home))
        down = asyncio.create_task(_pass_down(home, child))
        await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
        child_ended = up.done()
        for task in (up, down):
            task.cancel()
        child.kill()
        child.close()
        code = await child.wait()
        if child_ended:
            home.send(EngineDied(code, child.lacked_memory()))
        heard = await asyncio.gather(up, down, return_exceptions=True)
        return child_ended or heard[1] is True

    async def _pass_up(self, child: EngineChild, home: ParentChannel[ToEngine]) -> None:
        try:
            while True:
                message: WireMessage = await child.receive()
                if isinstance(message, LoadFailed):
                    self.failure = message.message
                if isinstance(message, Ready):
                    self.told.set()
                home.send(message)
        except Disconnected:
            if self.failure:
                self.told.set()


async def _pass_down(home: ParentChannel[ToEngine], child: EngineChild) -> bool:
    """Whether anything came."""
    heard = False
    try:
        while True:
            child.send(await home.receive())
            heard = True
    except Disconnected:
        return heard


class EngineReplica:
    """The class that Ray Serve deploys. It is ready when its engine is, so updates go on from one to the next."""

    def __init__(self, address: HomeAddress, app: str, job: str, leave_timeout_s: float) -> None:
        """job: of the API process."""
        from ray import serve
        from ray.util import get_node_ip_address

        self._app, self._job = app, job
        self._leave_timeout_s = leave_timeout_s
        name = serve.get_replica_context().replica_id.unique_id
        self._relay = EngineRelay(address, name, get_node_ip_address(), ENGINE_COMMAND, here())
        self._relay.told.wait()
        if self._relay.failure:
            self._end_with_api_process()
            raise RuntimeError(self._relay.failure)

    def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica that raises."""
        self._end_with_api_process()
        if self._relay.is_over.is_set():
            raise RuntimeError(self._relay.failure or "the replica has ended")

    def _end_with_api_process(self) -> None:
        """If it is gone, end the whole application. A replica that is only cut off from it ends alone."""
        if self._relay.is_orphan and is_job_over(self._job):
            from ray import serve

            serve.delete(self._app, _blocking=False)

    def __del__(self) -> None:
        """Called by Ray Serve when this replica is to leave."""
        if hasattr(self, "_relay") and not self._relay.is_over.is_set():
            self._relay.leave(self._leave_timeout_s)
