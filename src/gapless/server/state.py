"""The live state that the page shows: who runs and waits, how full the KV cache is, what the lanes did lately."""

from __future__ import annotations

from typing import Any

from gapless.server.metrics import Metrics
from gapless.server.service import Service

TIMELINE_TIMEOUT_S = 0.5


async def read_state(service: Service, metrics: Metrics, seconds: float) -> dict[str, Any]:
    """A reading. Counters are totals: the page shows their differences."""
    supervisor = service.supervisor
    pulse, info, totals = supervisor.pulse, supervisor.info, metrics.totals
    timeline = await supervisor.timeline(seconds, TIMELINE_TIMEOUT_S) if seconds > 0 else None
    running = pulse.num_running if pulse is not None else 0
    return {
        "model": service.names[0],
        "status": service.not_ready() or "ready",
        "loaded": 1.0 if supervisor.is_ready else supervisor.loaded_share,
        "device": info.device if info is not None else None,
        "vocab_size": info.vocab_size if info is not None else None,
        "running": running,
        "waiting": max(0, len(supervisor.roster) - running),
        "depth": pulse.depth if pulse is not None else None,
        "kv_use": pulse.num_used_blocks / info.num_blocks if pulse is not None and info is not None else 0.0,
        "engine_time_s": pulse.elapsed_s if pulse is not None else None,
        "busy_s": pulse.stats["busy_s"] if pulse is not None else None,
        "generated_tokens": totals.get("stats", "num_generated"),
        "prompt_tokens": totals.get("stats", "num_prompt_tokens"),
        "wasted_tokens": totals.get("stats", "num_overrun"),
        "restarts": supervisor.num_restarts,
        "idle_s": {cause: totals.get("idle", cause) for cause in totals.names("idle")},
        "ledger": {reason: totals.get("ledger", reason) for reason in totals.names("ledger")},
        "timeline": timeline.lanes if timeline is not None else {},
        "timeline_s": timeline.seconds if timeline is not None else 0.0,
    }
