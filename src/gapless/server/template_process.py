"""Chat templates in a process of their own: a template is a program that came with a model, and nobody reads it first.

The sandbox keeps it from files and modules; this keeps it from time and memory. A rendering that takes too long is
answered with an error, and its process is killed: it cannot hold the API process's interpreter lock meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from gapless.errors import GaplessError, InvalidRequest
from gapless.server.channel import ChildChannel, Disconnected, ParentChannel, become_child, spawn
from gapless.server.messages import Message
from gapless.text.chat import ChatTemplate

MAX_MEMORY_BYTES = 2 * 2**30
START_S = 30.0  # for the process itself to come up, on top of the rendering's own limit


class Template(Message, frozen=True):
    """The first message: what to render with."""

    template: str | None
    bos_token: str | None
    eos_token: str | None


class Render(Message, frozen=True):
    conversation: str  # JSON, which alone holds all that a client may have sent: numbers of any size, half characters
    extra: dict[str, Any]


class Rendered(Message, frozen=True):
    text: str


class Refused(Message, frozen=True):
    message: str


class Up(Message, frozen=True):
    """The process has started."""


ToTemplate = Template | Render
FromTemplate = Up | Rendered | Refused


def main(fd: int) -> None:
    """Render until the parent is gone."""
    become_child()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    channel: ChildChannel[ToTemplate] = ChildChannel(fd, ToTemplate)
    with contextlib.suppress(Disconnected):
        first = channel.receive()
        assert isinstance(first, Template)
        channel.send(Up())
        while True:
            message = channel.receive()
            assert isinstance(message, Render)
            channel.send(_render(first, message))
    os._exit(0)


@lru_cache(maxsize=1)
def _compile(given: Template) -> ChatTemplate:
    return ChatTemplate(given.template, bos_token=given.bos_token, eos_token=given.eos_token)


def _render(template: Template, message: Render) -> Rendered | Refused:
    try:
        text = _compile(template).render(json.loads(message.conversation), **message.extra)
        text.encode()
        return Rendered(text)
    except GaplessError as error:
        return Refused(str(error).encode("utf-8", "backslashreplace").decode())
    except UnicodeEncodeError:
        return Refused("the messages are not valid Unicode: they have a lone surrogate")
    except MemoryError:
        return Refused("the chat template needs too much memory")


class Renderer:
    """The parent's side: one rendering at a time, each with a deadline."""

    def __init__(self, template: Template, timeout_s: float) -> None:
        self._template = template
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: ParentChannel[FromTemplate] | None = None

    @property
    def pid(self) -> int | None:
        """Of the template process."""
        return self._process.pid if self._process is not None else None

    async def render(self, messages: Sequence[Mapping[str, Any]], **extra: Any) -> str:
        """The prompt text of a conversation. Raises InvalidRequest."""
        question = Render(json.dumps(messages), extra)
        async with self._lock:
            for _ in range(2):  # it may have died while it had nothing to do: only a second death is this one's
                with contextlib.suppress(Disconnected):
                    return _text(await self._ask(question))
        raise InvalidRequest("the chat template could not be rendered")

    async def _ask(self, question: Render) -> FromTemplate:
        answer = None
        try:
            channel = self._channel or await self.start()
            async with asyncio.timeout(self._timeout_s):
                channel.send(question)
                answer = await channel.receive()
            return answer
        except TimeoutError:
            raise InvalidRequest(f"the chat template took longer than {self._timeout_s:g} s") from None
        finally:
            if answer is None:
                self.close()  # it still works, or is dead; its late answer would be taken for another's

    async def start(self) -> ParentChannel[FromTemplate]:
        """Start the process; the first rendering would do so otherwise."""
        ours, theirs = socket.socketpair()
        command = (sys.executable, "-m", "gapless.server.template_process")
        self._process = spawn(command, (theirs.fileno(),))
        theirs.close()
        channel: ParentChannel[FromTemplate] = await ParentChannel.open(ours, FromTemplate)
        channel.send(self._template)
        try:
            async with asyncio.timeout(START_S):
                await channel.receive()
        except TimeoutError:
            raise Disconnected from None
        self._channel = channel
        return channel

    def close(self) -> None:
        """End the process; the next rendering starts another."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._process = self._channel = None


def _text(answer: FromTemplate) -> str:
    if isinstance(answer, Refused):
        raise InvalidRequest(answer.message)
    assert isinstance(answer, Rendered)
    return answer.text


if __name__ == "__main__":
    main(int(sys.argv[1]))
