"""How long the device idled and why: under a server's load, and offline with the same requests.

The comparison leaves out time in which there was nothing to run: before the first request and after the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gapless.bench.load import LoadRequest
from gapless.bench.openai_client import Endpoint, fetch
from gapless.config import EngineOptions

NOTHING = "nothing to run"
FRESH_S = 0.25  # the engine reports its counters more often than this


@dataclass(frozen=True, slots=True)
class Idle:
    """A run: its duration, and how long the device idled although there was work, by cause."""

    seconds: float
    by_cause: dict[str, float]

    @property
    def share(self) -> float:
        return sum(self.by_cause.values()) / self.seconds


def between(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> Idle:
    """From two readings of the seconds by cause."""
    spent = {cause: told - before.get(cause, 0.0) for cause, told in after.items() if cause != NOTHING}
    return Idle(seconds, {cause: idle_s for cause, idle_s in spent.items() if idle_s > 0})


@contextlib.asynccontextmanager
async def watched(endpoint: Endpoint) -> AsyncIterator[list[Idle]]:
    """Watches the device of a Gapless server during the block; appends one Idle to the list at the end."""
    found: list[Idle] = []
    before = await _settled(endpoint)
    began_s = time.perf_counter()
    yield found
    seconds = time.perf_counter() - began_s
    found.append(between(before, await _settled(endpoint), seconds))


async def _settled(endpoint: Endpoint) -> dict[str, float]:
    """A reading that is newer than now, of a server without requests."""
    first = await _quiet(endpoint)
    while (state := await _quiet(endpoint))["engine_time_s"] < first["engine_time_s"] + FRESH_S:
        await asyncio.sleep(0.05)
    return dict(state["idle_s"])


async def _quiet(endpoint: Endpoint) -> Any:
    """The state of a server without requests whose engine has been heard of."""
    while True:
        state = await fetch(endpoint, "/state?seconds=0")
        if state["engine_time_s"] is not None and not (state["running"] or state["waiting"]):
            return state
        await asyncio.sleep(0.05)


def offline(engine: EngineOptions, asks: Sequence[LoadRequest]) -> Idle:
    """The same requests, all at once, without a server."""
    from gapless.core.params import SamplingParams
    from gapless.llm import LLM

    params = [SamplingParams(max_tokens=ask.max_tokens, temperature=0, ignore_eos=True) for ask in asks]
    prompts = [ask.prompt for ask in asks]
    with LLM(**asdict(replace(engine, trace=None))) as llm:
        llm.generate(prompts[:1], params[:1])
        before, began_s = llm.engine.monitor.idle_by_cause(), time.perf_counter()
        llm.generate(prompts, params)
        seconds = time.perf_counter() - began_s
        return between(before, llm.engine.monitor.idle_by_cause(), seconds)


def format_idle(*, served: Idle, offline: Idle) -> str:
    """Both shares, their difference, and the main causes."""
    points = f"{100 * (served.share - offline.share):+.2f} points"
    lines = [f"device idle with work to do: {served.share:.2%} served, {offline.share:.2%} offline, {points}"]
    causes = sorted({*served.by_cause, *offline.by_cause}, key=lambda cause: -served.by_cause.get(cause, 0.0))
    for cause in causes:
        shares = [run.by_cause.get(cause, 0.0) / run.seconds for run in (served, offline)]
        if max(shares) >= 0.0005:
            lines.append(f"  {cause:<24}{shares[0]:>9.2%} served{shares[1]:>9.2%} offline")
    return "\n".join(lines)
