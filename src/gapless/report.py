"""Numbers as people read them. Knows the counters; prints nothing itself."""

from __future__ import annotations

import resource
import sys

from gapless.pipeline.engine import Engine, Stats


def overlap_line(stats: Stats, engine: Engine) -> str:
    """How well host and device overlapped between two readings, in one line."""
    seconds = max(stats.time_s, 1e-9)
    parts = [
        f"{stats.num_steps} steps",
        f"{stats.num_generated / seconds:.0f} tok/s",
        f"device busy {stats.busy_s / seconds:.1%}",
        f"{stats.num_overrun} wasted tokens",
        f"depth {engine.depth}" + ("" if engine.depth_is_final else " (still measuring)"),
    ]
    if stats.num_cached_tokens:
        parts.append(f"{stats.num_cached_tokens / max(stats.num_prompt_tokens, 1):.0%} of prompt tokens cached")
    if stats.num_preemptions:
        parts.append(f"{stats.num_preemptions} preemptions")
    parts += [f"{count} steps with {reason}" for reason, count in engine.ledger().items()]
    parts.append(f"peak memory {readable_bytes(peak_memory())}")
    return "overlap: " + ", ".join(parts)


def peak_memory() -> int:
    """Bytes of memory that this process has held at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def readable_bytes(count: int) -> str:
    """Such as 1.5 GiB."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
