"""One engine process as its parent sees it, from its start to its death.

Owns the process, the socket pair and the pipe into which the process writes each request that is about to run. What is
in a pipe survives its writer, so the last request is known even after a crash. Knows no requests but their numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from gapless.child import spawn
from gapless.server.channel import Disconnected, ParentChannel
from gapless.server.messages import FromEngine, WireMessage

STARTED_BYTES = 8


class EngineLink(Protocol):
    """An engine process as its supervisor sees it, wherever it runs. EngineChild says what each method does."""

    @property
    def pid(self) -> int: ...

    @property
    def is_alive(self) -> bool: ...

    def send(self, message: WireMessage) -> None: ...

    async def receive(self) -> FromEngine: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...

    async def wait(self) -> int: ...

    def lacked_memory(self) -> bool: ...


OnStarted = Callable[[int], None]  # told the number of each request that starts, on the event loop
LinkSource = Callable[[OnStarted], Awaitable[EngineLink]]  # the next engine process, which has been started


def children(command: Sequence[str]) -> LinkSource:
    """Engine processes that are children of this one."""
    return partial(_start_child, command)


async def _start_child(command: Sequence[str], on_started: OnStarted) -> EngineLink:
    child = EngineChild(command, on_started)
    await child.open()
    return child


class EngineChild:
    """An engine process. It runs once made; `open` before anything is said."""

    def __init__(self, command: Sequence[str], on_started: OnStarted) -> None:
        self._on_started = on_started
        self._channel: ParentChannel[FromEngine] | None = None
        self._num_oom_kills = count_oom_kills()
        self._socket, theirs = socket.socketpair()
        self._started_fd, started_w = os.pipe()
        os.set_blocking(self._started_fd, False)
        try:
            self._process = spawn(command, (theirs.fileno(), started_w))
        finally:
            theirs.close()
            os.close(started_w)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def open(self) -> None:
        """Listen to it."""
        asyncio.get_running_loop().add_reader(self._started_fd, self._read_started)
        self._channel = await ParentChannel.open(self._socket, FromEngine)

    def send(self, message: WireMessage) -> None:
        """One to a process that is gone is dropped."""
        if self._channel is not None:
            self._channel.send(message)

    async def receive(self) -> FromEngine:
        """The next message. Raises Disconnected once the process is gone."""
        if self._channel is None:
            raise Disconnected
        return await self._channel.receive()

    def kill(self) -> None:
        if self.is_alive:
            self._process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Read what it started last, and say no more to it."""
        self._read_started()
        asyncio.get_running_loop().remove_reader(self._started_fd)
        os.close(self._started_fd)
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    async def wait(self) -> int:
        """Its exit code."""
        return await asyncio.to_thread(self._process.wait)

    def lacked_memory(self) -> bool:
        """Whether the system has killed any process for lack of memory since this one was started."""
        return count_oom_kills() != self._num_oom_kills

    def _read_started(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._started_fd, 512 * STARTED_BYTES):
                for start in range(0, len(data), STARTED_BYTES):
                    self._on_started(int.from_bytes(data[start : start + STARTED_BYTES], "little"))
            asyncio.get_running_loop().remove_reader(self._started_fd)


def count_oom_kills(path: Path = Path("/proc/vmstat")) -> int:
    """Processes that the system has killed for lack of memory; 0 where it does not say."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
