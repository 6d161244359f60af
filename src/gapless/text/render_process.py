"""Chat templates in a process of their own: a template is an unreviewed program that came with a model.

The sandbox protects files and modules. This process limits time and memory. A rendering that takes too long is an
error, and its process is killed. Frames are four bytes of length and JSON, over a socket pair.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from gapless.child import become_child, spawn
from gapless.errors import CorruptModel, GaplessError, InvalidRequest, TemplateBusy
from gapless.text.chat import ChatTemplate, Conversation

MAX_MEMORY_BYTES = 2 * 2**30
TIMEOUT_S = 2.0
QUICK_S = 0.25
START_S = 30.0  # for the process itself to come up, on top of the rendering's own limit
_HEADER = struct.Struct("<I")
_READ_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template, and the tokens that it may write."""

    template: str | None
    bos_token: str | None = None
    eos_token: str | None = None


class RendererGone(Exception):
    """The other side is gone."""


class Frames:
    """One side of the socket pair. A timeout in the middle of a frame loses nothing of it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._read = bytearray()

    def send(self, frame: bytes, *, deadline: float | None = None) -> None:
        try:
            self._socket.settimeout(_left(deadline))
            self._socket.sendall(frame)
        except TimeoutError:
            raise
        except OSError as error:
            raise RendererGone from error

    def receive(self, *, deadline: float | None = None) -> Any:
        """The next value. Raises TimeoutError at the deadline, a time of the monotonic clock."""
        self._fill(_HEADER.size, deadline)
        size = _HEADER.size + _HEADER.unpack_from(self._read)[0]
        self._fill(size, deadline)
        value = json.loads(self._read[_HEADER.size : size])
        del self._read[:size]
        return value

    def _fill(self, size: int, deadline: float | None) -> None:
        try:
            while len(self._read) < size:
                self._socket.settimeout(_left(deadline))
                data = self._socket.recv(_READ_BYTES)
                if not data:
                    raise RendererGone
                self._read += data
        except TimeoutError:
            raise
        except OSError as error:
            raise RendererGone from error

    def close(self) -> None:
        self._socket.close()


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(1e-3, deadline - time.monotonic())


def pack(value: object) -> bytes:
    """A value as a frame. Escaped JSON can hold everything that a client may send: numbers of any size, lone
    surrogates.
    """
    data = json.dumps(value).encode()
    return _HEADER.pack(len(data)) + data


class RenderProcess:
    """The parent's side: one rendering at a time, from any thread. The first one starts the process."""

    def __init__(
        self, source: TemplateSource, timeout_s: float = TIMEOUT_S, slow: threading.Semaphore | None = None
    ) -> None:
        self._source = source
        self._timeout_s = timeout_s
        self._slow = slow  # shared by several processes: how many of them may take longer than QUICK_S
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._frames: Frames | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def render(self, conversations: Sequence[Conversation]) -> list[str | None]:
        """Prompt texts of all versions of a conversation; None for one after the first that cannot be rendered.

        Raises InvalidRequest, and CorruptModel for a template that cannot be compiled.
        """
        question = _question(conversations)
        with self._lock:
            for _ in range(2):  # it may have died while idle: only a second death is caused by this rendering
                with contextlib.suppress(RendererGone):
                    return _texts(self._ask(question))
        raise InvalidRequest("the chat template could not be rendered", "messages")

    def _ask(self, question: bytes) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] | None = None
        try:
            frames = self._frames or self.start()
            deadline = time.monotonic() + self._timeout_s
            frames.send(question, deadline=deadline)
            answer = self._wait(frames, deadline)
            return answer
        except TimeoutError:
            raise InvalidRequest(f"the chat template took longer than {self._timeout_s:g} s", "messages") from None
        finally:
            if answer is None:
                self.close()  # it is still working, or dead; its late answer would be taken for a different one

    def _wait(self, frames: Frames, deadline: float) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]]
        if self._slow is not None:
            with contextlib.suppress(TimeoutError):
                answer = frames.receive(deadline=min(deadline, time.monotonic() + QUICK_S))
                return answer
            if not self._slow.acquire(blocking=False):
                raise TemplateBusy("too many conversations take the chat template long; try again later", "messages")
        try:
            answer = frames.receive(deadline=deadline)
            return answer
        finally:
            if self._slow is not None:
                self._slow.release()

    def start(self) -> Frames:
        """Start the process and wait until it is ready."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = spawn((sys.executable, "-m", "gapless.text.render_process"), (theirs.fileno(),))
        frames = self._frames = Frames(ours)
        frames.send(pack(asdict(self._source)))
        try:
            frames.receive(deadline=time.monotonic() + START_S)
        except TimeoutError:
            raise RendererGone from None
        return frames

    def close(self) -> None:
        """End the process; a later rendering starts it again."""
        if self._frames is not None:
            self._frames.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._frames = None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # never finished building
            self.close()


def _question(conversations: Sequence[Conversation]) -> bytes:
    try:
        return pack([[each.messages, dict(each.extra)] for each in conversations])
    except RecursionError:
        raise InvalidRequest("the messages are nested too deeply", "messages") from None
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"messages must be what JSON can hold: {error}", "messages") from None


def _texts(answers: list[dict[str, Any]]) -> list[str | None]:
    first = answers[0]
    if "error" in first:
        if first["is_corrupt"]:
            raise CorruptModel(first["error"])
        raise InvalidRequest(first["error"], first.get("param", "messages"))
    return [answer.get("text") for answer in answers]


def main(fd: int) -> None:
    """Render until the parent is gone."""
    become_child()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    frames = Frames(socket.socket(fileno=fd))
    with contextlib.suppress(RendererGone):
        source = TemplateSource(**frames.receive())
        frames.send(pack("up"))
        while True:
            frames.send(pack([_answer(source, *conversation) for conversation in frames.receive()]))
    os._exit(0)


@lru_cache(maxsize=1)
def _compile(source: TemplateSource) -> ChatTemplate:
    return ChatTemplate(source.template, bos_token=source.bos_token, eos_token=source.eos_token)


def _answer(source: TemplateSource, messages: list[dict[str, Any]], extra: dict[str, Any]) -> dict[str, Any]:
    try:
        text = _compile(source).render(messages, **extra)
        text.encode()
        return {"text": text}
    except GaplessError as error:
        said = str(error).encode("utf-8", "backslashreplace").decode()
        param = error.param if isinstance(error, InvalidRequest) else None
        return {"error": said, "is_corrupt": isinstance(error, CorruptModel), "param": param}
    except UnicodeEncodeError:
        said = "the messages are not valid Unicode: they have a lone surrogate"
    except MemoryError:
        said = "the chat template needs too much memory"
    return {"error": said, "is_corrupt": False}


if __name__ == "__main__":
    main(int(sys.argv[1]))
