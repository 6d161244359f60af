"""The connection between the API process and the engine of a replica, which may be on a different machine.

The messages are those of an engine process beside the API process, and a few more: who calls, which requests have
started, how the engine ended, and that the replica is asked to leave. A connection lives as long as its engine.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from typing import Any

from gapless.server.channel import Disconnected, ParentChannel
from gapless.server.engine_child import OnStarted
from gapless.server.messages import FromEngine, Ready, WireMessage

STREAM_LIMIT = 2**20
SILENCE_S = 20.0  # of an engine that sends five pulses a second: its node or the network is gone


class Hello(WireMessage, frozen=True):
    """The first message of a connection."""

    secret: str  # shown by replicas of this server only
    replica: str
    node: str
    versions: tuple[str, str, str]
    engine_pid: int


class Started(WireMessage, frozen=True):
    """A request is about to run for the first time."""

    id: int


class EngineDied(WireMessage, frozen=True):
    """The last message of a connection: the engine is gone, and the replica will call again with a new one."""

    exit_code: int
    lacked_memory: bool


class Leaving(WireMessage, frozen=True):
    """The replica is asked to stop. It waits, within limits, until its requests are finished or moved."""


FromReplica = FromEngine | Started | EngineDied | Leaving


class RemoteEngine:
    """The engine of a replica: an EngineLink whose process is not a child of this one."""

    def __init__(self, channel: ParentChannel[Any], hello: Hello, on_leaving: Callable[[], None]) -> None:
        self.hello = hello
        self._channel = channel
        self._on_leaving = on_leaving
        self._on_started: OnStarted = lambda id: None
        self._died: EngineDied | None = None
        self._is_closed = False  # by us
        self._is_ready = False
        self._is_over = asyncio.Event()

    @property
    def pid(self) -> int:
        return self.hello.engine_pid

    @property
    def is_alive(self) -> bool:
        return not self._is_over.is_set()

    @property
    def may_call_again(self) -> bool:
        """Whether the replica outlived its engine, as far as one can know here."""
        return self._died is not None or self._is_closed

    def listen(self, on_started: OnStarted) -> None:
        self._on_started = on_started

    def send(self, message: WireMessage) -> None:
        self._channel.send(message)

    async def receive(self) -> FromEngine:
        """Raises Disconnected when the engine or the whole replica is gone."""
        while True:
            try:
                async with asyncio.timeout(SILENCE_S if self._is_ready else None):
                    message = await self._channel.receive()
            except (Disconnected, TimeoutError):
                self.close()
                raise Disconnected from None
            match message:
                case Ready():
                    self._is_ready = True
                    return message
                case Started(id):
                    self._on_started(id)
                case Leaving():
                    self._on_leaving()
                case EngineDied():
                    self._died = message
                    self._is_over.set()
                    raise Disconnected
                case _:
                    return message  # type: ignore[no-any-return]

    def kill(self) -> None:
        """The replica ends an engine whose connection is closed."""
        if self.is_alive:
            self._is_closed = True
        self.close()

    def close(self) -> None:
        self._channel.close()
        self._is_over.set()

    async def wait(self) -> int:
        """A replica that is gone without a word was killed, or its node was, or the network between."""
        return self._died.exit_code if self._died is not None else -signal.SIGKILL

    def lacked_memory(self) -> bool:
        return self._died is not None and self._died.lacked_memory


def send_at_once(writer: asyncio.StreamWriter) -> None:
    """Small messages must not wait for larger ones."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
