"""Many clients at once."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import pytest
from servers import running

from gapless.bench.openai_client import Endpoint, stream

NUM_CLIENTS = 500


@pytest.mark.slow
def test_five_hundred_connections(tmp_path: Path, long_dir: Path) -> None:
    """All are open at the same time, and each gets the whole of its own answer; a quarter leave in the middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        with running(tmp_path / "log.jsonl", long_dir, "--num-blocks", "4096", "--max-queue", "1000") as server:
            endpoint = Endpoint.from_url(server.url)
            alone = [asyncio.run(text(endpoint, i)) for i in range(10)]
            found = asyncio.run(everybody(endpoint))
            assert [found[i] for i in range(NUM_CLIENTS) if i % 4] == [
                alone[i % 10] for i in range(NUM_CLIENTS) if i % 4
            ]
            assert server.metric("gapless_requests_total") == NUM_CLIENTS + 10
            server.metrics_settle("gapless_running_requests", 0)
            server.metrics_settle("gapless_kv_use_ratio", 0)
            assert server.stop() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def text(endpoint: Endpoint, number: int, leave_after: int | None = None) -> str:
    body = {
        "prompt": f"Number {number % 10}",
        "max_tokens": 40,
        "seed": number % 10,
        "ignore_eos": True,
        "stream": True,
    }
    found, events = "", stream(endpoint, "/v1/completions", body)
    async for event in events:
        found += event["choices"][0]["text"]
        if leave_after is not None and len(found) >= leave_after:
            break
    await events.aclose()  # type: ignore[attr-defined]
    return found


async def everybody(endpoint: Endpoint) -> list[str]:
    return await asyncio.gather(*(text(endpoint, i, None if i % 4 else 5) for i in range(NUM_CLIENTS)))
