"""Streams of events: a client that takes nothing is gone after a while, and silence of the engine is not its fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gapless.server.sse import EventStream, LongResponse

LIMIT_S = 0.05


class Client:
    """Takes so many messages and then no more."""

    def __init__(self, takes: int) -> None:
        self.got: list[Any] = []
        self._takes = takes

    async def send(self, message: Any) -> None:
        if len(self.got) >= self._takes:
            await asyncio.sleep(3600)
        self.got.append(message)

    async def receive(self) -> Any:
        await asyncio.sleep(3600)


async def answer(client: Client, response: EventStream | LongResponse) -> None:
    async with asyncio.timeout(10):
        await response({"type": "http"}, client.receive, client.send)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


def stream(events: AsyncIterator[bytes], closed: list[bool]) -> EventStream:
    return EventStream(events, lambda error: b"", lambda: closed.append(True), LIMIT_S)


def test_a_client_that_takes_nothing_is_gone() -> None:
    async def events() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            ended.append(True)

    ended: list[bool] = []
    closed: list[bool] = []
    client = Client(takes=3)
    asyncio.run(answer(client, stream(events(), closed)))
    assert len(client.got) == 3
    assert ended == closed == [True]


def test_a_silent_engine_is_waited_for() -> None:
    async def events() -> AsyncIterator[bytes]:
        for _ in range(2):
            await asyncio.sleep(3 * LIMIT_S)
            yield b"data: x\n\n"

    closed: list[bool] = []
    client = Client(takes=100)
    asyncio.run(answer(client, stream(events(), closed)))
    assert [message.get("body") for message in client.got[1:]] == [b"data: x\n\n"] * 2 + [b""]


def test_a_long_answer_ends_with_its_client() -> None:
    client = Client(takes=2)
    asyncio.run(answer(client, LongResponse(b"x" * 2**20, LIMIT_S)))
    assert len(client.got) == 2


@pytest.mark.parametrize("count", [1, 100])
def test_others_have_their_turn_during_a_long_stream(count: int) -> None:
    async def events() -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b"data: x\n\n"

    async def main() -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.ensure_future(other())
        await answer(Client(takes=1000), stream(events(), []))
        beside.cancel()
        assert turns >= count // 16

    asyncio.run(main())
