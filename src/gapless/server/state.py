"""The live state that the page shows: who runs and waits, how full the KV cache is, what the lanes did lately."""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from typing import Any

from gapless.server.engines import ONLY
from gapless.server.service import Service
from gapless.server.supervisor import Supervisor
from gapless.server.totals import EngineTotals

TIMELINE_TIMEOUT_S = 0.5


async def read_state(service: Service, seconds: float) -> dict[str, Any]:
    """A reading. Counters are totals: the page shows their differences."""
    engines, info = service.engines, service.engines.info
    members, totals = engines.members(), list(engines.totals().values())
    found = dict(zip(members, await asyncio.gather(*(_engine(one, seconds) for one in members.values())), strict=True))
    running = sum(one.num_running for one in members.values())
    first: dict[str, Any] = next(iter(found.values()), {})
    return {
        "model": service.names[0],
        "status": service.not_ready() or "ready",
        "loaded": 1.0 if engines.is_ready else engines.loaded_share,
        "device": info.device if info is not None else None,
        "vocab_size": info.vocab_size if info is not None else None,
        "running": running,
        "waiting": max(0, len(engines.unfinished()) - running),
        "depth": first.get("depth"),
        "kv_use": sum(one.kv_use for one in members.values()) / max(1, len(members)),
        "engine_time_s": _sum(found, "engine_time_s"),
        "busy_s": _sum(found, "busy_s"),
        "generated_tokens": sum(one.get("stats", "num_generated") for one in totals),
        "prompt_tokens": sum(one.get("stats", "num_prompt_tokens") for one in totals),
        "wasted_tokens": sum(one.get("stats", "num_overrun") for one in totals),
        "restarts": engines.num_restarts,
        "idle_s": _by_name(totals, "idle"),
        "ledger": _by_name(totals, "ledger"),
        "timeline": first.get("timeline", {}),
        "timeline_s": first.get("timeline_s", 0.0),
        "replicas": [] if ONLY in found else [{"name": name, **one} for name, one in found.items()],
    }


async def _engine(engine: Supervisor, seconds: float) -> dict[str, Any]:
    """One engine."""
    pulse, totals = engine.pulse, engine.counters
    timeline = await engine.timeline(seconds, TIMELINE_TIMEOUT_S) if seconds > 0 else None
    return {
        "status": engine.status,
        "running": engine.num_running,
        "unfinished": len(engine.roster),
        "depth": pulse.depth if pulse is not None else None,
        "kv_use": engine.kv_use,
        "engine_time_s": pulse.elapsed_s if pulse is not None else None,
        "busy_s": pulse.stats["busy_s"] if pulse is not None else None,
        "generated_tokens": totals.get("stats", "num_generated"),
        "prompt_tokens": totals.get("stats", "num_prompt_tokens"),
        "cached_tokens": totals.get("stats", "num_cached_tokens"),
        "idle_s": _by_name([totals], "idle"),
        "timeline": timeline.lanes if timeline is not None else {},
        "timeline_s": timeline.seconds if timeline is not None else 0.0,
    }


def _sum(engines: dict[str, dict[str, Any]], name: str) -> float | None:
    """None while no engine says it."""
    values = [one[name] for one in engines.values() if one[name] is not None]
    return sum(values) if values else None


def _by_name(totals: list[EngineTotals], kind: str) -> dict[str, float]:
    found: Tally[str] = Tally()
    for one in totals:
        found.update({name: one.get(kind, name) for name in one.names(kind)})
    return dict(found)
