"""A server whose model lies on two ranks: a lost rank is a pause for its clients, and nobody is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from servers import Server, eventually, running

PROMPTS = [f"{number} times {number} is" for number in range(4)]
NUM_TOKENS = 120

Disturb = Callable[[list[int]], Awaitable[None]]


def children(parent: int) -> list[int]:
    """Processes that this one has started, by their numbers."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, ppid = path.read_text().rpartition(")")[2].split()[:2]
            found += [int(path.parent.name)] if int(ppid) == parent and state != "Z" else []
    return found


async def stream(client: openai.AsyncOpenAI, prompt: str, seed: int, seen: list[int]) -> str:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": NUM_TOKENS, "temperature": 1.0, "stream": True}
    text = ""
    extra = {"ignore_eos": True}
    async for chunk in await client.completions.create(**asked, prompt=prompt, seed=seed, extra_body=extra):
        text += chunk.choices[0].text
        seen[0] += 1
    return text


async def stream_all(server: Server, disturb: Disturb | None = None) -> list[str]:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=200)
    seen = [0]
    work = asyncio.gather(*(stream(client, prompt, seed, seen) for seed, prompt in enumerate(PROMPTS)))
    if disturb is not None:
        await disturb(seen)
        assert not work.done()
    return list(await work)


@pytest.mark.slow
def test_a_lost_rank_is_a_pause_for_clients(tmp_path: Path, long_dir: Path) -> None:
    flags = ("--tensor-parallel", "2", "--served-model-name", "tiny", "--num-blocks", "512")
    with running(tmp_path / "log.jsonl", long_dir, *flags) as server:
        undisturbed = asyncio.run(stream_all(server))
        assert all(len(text) > 0.8 * NUM_TOKENS for text in undisturbed)

        async def kill(seen: list[int]) -> None:
            while seen[0] < 40:
                await asyncio.sleep(0.005)
            (follower,) = children(server.engine_pid)
            os.kill(follower, signal.SIGKILL)

        assert asyncio.run(stream_all(server, kill)) == undisturbed
        assert server.metric("gapless_engine_restarts_total") == 1
        first, second = server.engine_pid, children(server.engine_pid)
        assert len(second) == 1
        os.kill(second[0], signal.SIGKILL)  # while nothing runs
        eventually(lambda: server.num_engines == 3, server)
        assert server.engine_pid != first
        assert asyncio.run(stream_all(server)) == undisturbed
        (follower,) = children(server.engine_pid)
        assert any("rank 1 was killed by SIGKILL" in line["message"] for line in server.lines())
        assert server.stop() == 0
    eventually(lambda: not Path(f"/proc/{follower}").exists())
