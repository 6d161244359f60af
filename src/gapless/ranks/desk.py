"""Where ranks on other nodes call: a listening socket of rank 0's node, for callers that know its token.

A call begins with the token, the rank, and what the connection is for; other callers are hung up on. The token is
random and reaches ranks through Ray.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from gapless.ranks.link import readable

LINK, PLANS = range(2)  # what a connection is for
CALL_S = 20.0  # to reach rank 0
MOST_STRANGERS = 64  # that have called and not said who they are
_HELLO = struct.Struct("<32sii")


@dataclass(frozen=True, slots=True)
class DeskCall:
    """A connection of a rank."""

    rank: int
    part: int
    end: socket.socket


@dataclass(frozen=True, slots=True)
class DeskAddress:
    """What a rank must know to call."""

    host: str
    port: int
    token: bytes


class Desk:
    """The listening socket."""

    def __init__(self, host: str, timeout_s: float) -> None:
        """timeout_s: of connections whose other end says nothing."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self._timeout_s = timeout_s
        self._strangers: dict[socket.socket, bytes] = {}  # and what they have said
        self.address = DeskAddress(host, self._socket.getsockname()[1], secrets.token_bytes(32))

    def calls(self, timeout_s: float) -> Iterator[DeskCall]:
        """Those that have come, after a wait for the next."""
        fds = readable([self._socket.fileno(), *(end.fileno() for end in self._strangers)], timeout_s)
        for end in list(self._strangers):
            if end.fileno() in fds and (call := self._hear(end)) is not None:
                yield call
        if self._socket.fileno() in fds:
            self._greet(self._socket.accept()[0])

    def _greet(self, end: socket.socket) -> None:
        if len(self._strangers) >= MOST_STRANGERS:
            self._dismiss(next(iter(self._strangers)))
        self._strangers[end] = b""

    def _hear(self, end: socket.socket) -> DeskCall | None:
        try:
            data = end.recv(_HELLO.size - len(self._strangers[end]))
        except OSError:
            data = b""
        said = self._strangers[end] + data
        if data and len(said) < _HELLO.size:
            self._strangers[end] = said
            return None
        if len(said) < _HELLO.size or not hmac.compare_digest(said[:32], self.address.token):
            self._dismiss(end)
            return None
        del self._strangers[end]
        _, rank, part = _HELLO.unpack(said)
        keep_watch(end, self._timeout_s)
        return DeskCall(rank, part, end)

    def _dismiss(self, end: socket.socket) -> None:
        del self._strangers[end]
        end.close()

    def close(self) -> None:
        for end in list(self._strangers):
            self._dismiss(end)
        self._socket.close()


def call(address: DeskAddress, rank: int, part: int, timeout_s: float) -> socket.socket:
    """A connection to rank 0. Raises OSError."""
    deadline = time.monotonic() + CALL_S
    end = socket.create_connection((address.host, address.port), CALL_S)
    end.settimeout(max(0.1, deadline - time.monotonic()))
    end.sendall(_HELLO.pack(address.token, rank, part))
    end.settimeout(None)
    keep_watch(end, timeout_s)
    return end


def keep_watch(end: socket.socket, timeout_s: float) -> None:
    """Small messages go at once, and a node that vanished without a word is noticed within the time limit."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause_s = max(1, int(timeout_s / 5))
    limits = {"TCP_KEEPIDLE": pause_s, "TCP_KEEPALIVE": pause_s, "TCP_KEEPINTVL": pause_s, "TCP_KEEPCNT": 3}
    limits["TCP_USER_TIMEOUT"] = max(1000, int(timeout_s * 1000))  # ms
    for name, value in limits.items():  # which of them there are depends on the system
        if (option := getattr(socket, name, None)) is not None:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.IPPROTO_TCP, option, value)
