"""Where replicas call: a socket of the API process that takes connections from its own replicas only.

A caller shows a secret that only replicas of this server were given, and the versions that it runs. What it says after
that cannot carry code, as between the API process and an engine beside it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import msgspec

from gapless.distributed.cluster import NodeVersions
from gapless.distributed.link import STREAM_LIMIT, FromReplica, Hello, send_at_once
from gapless.server.channel import Disconnected, ParentChannel

HELLO_S = 10.0  # for a caller to say who it is
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HomeAddress:
    """What a replica needs to know to call."""

    host: str
    port: int
    secret: str


class Home:
    """The listening socket."""

    def __init__(
        self,
        host: str,
        versions: NodeVersions,
        on_call: Callable[[ParentChannel[Any], Hello], None],
        on_difference: Callable[[str], None],
    ) -> None:
        """on_difference: told which versions of a node differ from ours; it cannot serve."""
        self._host = host
        self._versions = versions
        self._on_call = on_call
        self._on_difference = on_difference
        self._secret = secrets.token_hex(32)
        self._server: asyncio.Server | None = None

    async def open(self) -> HomeAddress:
        self._server = await asyncio.start_server(self._take, self._host, 0, limit=STREAM_LIMIT)
        port = self._server.sockets[0].getsockname()[1]
        return HomeAddress(self._host, port, self._secret)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await ParentChannel[Hello](reader, writer, Hello).receive()
            if not hmac.compare_digest(hello.secret, self._secret):
                raise ValueError("the secret is wrong")
            theirs = NodeVersions(*hello.versions)
        except (Disconnected, TimeoutError, ValueError, TypeError, msgspec.MsgspecError) as error:
            log.warning("a connection that is not of a replica was closed: %s", error)
            writer.close()
            return
        if difference := self._versions.difference(theirs):
            writer.close()
            self._on_difference(f"node {hello.node} has {difference}; install the same versions on all nodes")
            return
        send_at_once(writer)
        self._on_call(ParentChannel(reader, writer, FromReplica), hello)


def hello_of(address: HomeAddress, replica: str, node: str, versions: NodeVersions, engine_pid: int) -> Hello:
    return Hello(address.secret, replica, node, astuple(versions), engine_pid)
