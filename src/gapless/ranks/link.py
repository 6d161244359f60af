"""Words between rank 0 and another rank while they start, and last words: lines of JSON over a socket.

Plans do not go this way, but through the ring, or a connection of their own.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

Word = dict[str, Any]  # its `kind`: here, start, sign, ready, go or failed


class Link:
    """One end."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._rest = b""
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: str, **values: Any) -> None:
        """Does nothing where the other end is gone, which its owner learns by reading."""
        line = json.dumps({"kind": kind, **values}).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(line)

    def receive(self) -> Word | None:
        """Wait for the next word; None when the other end is gone."""
        while True:
            for word in self._complete():
                return word
            if not self._read():
                return None

    def waiting(self) -> tuple[list[Word], bool]:
        """The words that have come, and whether the other end is still there. To be called when it can be read."""
        is_open = self._read()
        return list(self._complete()), is_open

    def close(self) -> None:
        self._socket.close()

    def _read(self) -> bool:
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        self._rest += data
        return bool(data)

    def _complete(self) -> Iterator[Word]:
        while b"\n" in self._rest:
            line, _, self._rest = self._rest.partition(b"\n")
            yield json.loads(line)


def readable(fds: Sequence[int], timeout_s: float | None) -> set[int]:
    """Those that can be read, once there is one. Not by select(), which knows no descriptor above 1023."""
    with selectors.PollSelector() as selector:
        for fd in fds:
            selector.register(fd, selectors.EVENT_READ)
        return {key.fd for key, _ in selector.select(timeout_s)}
