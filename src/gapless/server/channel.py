"""Messages over a socket pair between a process and a child of it.

A frame is four bytes of length and a msgspec message. A socket pair has no name on the disk, nobody else can connect to
it, and either side reads end-of-file the moment the other one dies. Knows no engine and no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from typing import Any, Generic, TypeVar

import msgspec

from gapless.server.messages import WireMessage

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 256 * 2**20
T = TypeVar("T")


class Disconnected(Exception):
    """The other side is gone."""


class ChildChannel(Generic[T]):
    """The child's side: blocking, any thread may send."""

    def __init__(self, fd: int, kind: Any) -> None:
        self._socket = socket.socket(fileno=fd)
        self._file = self._socket.makefile("rb", buffering=2**16)
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()

    def send(self, message: WireMessage) -> None:
        frame = encode(self._encoder, message)
        try:
            with self._lock:
                self._socket.sendall(frame)
        except OSError as error:
            raise Disconnected from error

    def receive(self) -> T:
        try:
            size = HEADER.unpack(self._read(HEADER.size))[0]
            message: T = self._decoder.decode(self._read(size))
        except OSError as error:
            raise Disconnected from error
        return message

    def _read(self, size: int) -> bytes:
        data: bytes = self._file.read(size)
        if len(data) < size:
            raise Disconnected
        return data


class ParentChannel(Generic[T]):
    """The parent's side, on an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def open(cls, sock: socket.socket, kind: Any) -> ParentChannel[T]:
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=2**20)
        return cls(reader, writer, kind)

    def send(self, message: WireMessage) -> None:
        """Queue a message; one to a side that is gone is dropped."""
        if not self._writer.is_closing():
            self._writer.write(encode(self._encoder, message))

    async def receive(self) -> T:
        try:
            size = HEADER.unpack(await self._reader.readexactly(HEADER.size))[0]
            message: T = self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Disconnected from error
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close()


def encode(encoder: msgspec.msgpack.Encoder, message: WireMessage) -> bytes:
    """A message as a frame."""
    frame = bytearray(HEADER.size)
    encoder.encode_into(message, frame, HEADER.size)
    size = len(frame) - HEADER.size
    assert size <= MAX_FRAME_BYTES, f"a message of {size} bytes"
    HEADER.pack_into(frame, 0, size)
    return bytes(frame)
