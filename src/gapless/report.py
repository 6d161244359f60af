"""Numbers as people read them. Knows the counters; prints nothing itself."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping

from gapless.pipeline.engine import Monitor, Stats
from gapless.trace.text import readable_s

MOST_REASONS = 12  # of the ledger, in a line
TOP_CAUSES = 3


class OverlapMeter:
    """Reads an engine's counters when made, and says at the end what came between."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self.before = monitor.stats()
        self._idle = monitor.idle_by_cause()

    def summary(self) -> str:
        """How well host and device overlapped: steps, speed, busy share, waste, and why the device idled."""
        monitor = self._monitor
        stats, idle = monitor.stats() - self.before, monitor.idle_by_cause()
        spent = {cause: seconds - self._idle[cause] for cause, seconds in idle.items()}
        why = idle_line(spent, stats.time_s) if monitor.is_recorded else ""
        lines = [overlap_line(stats, monitor), why, monitor.capture_cost(), monitor.attention()]
        return "\n".join(line for line in lines if line)


def overlap_line(stats: Stats, monitor: Monitor) -> str:
    """How well host and device overlapped between two readings, in one line."""
    seconds = max(stats.time_s, 1e-9)
    parts = [
        f"{stats.num_steps} step{'' if stats.num_steps == 1 else 's'}",
        f"{stats.num_generated / seconds:.0f} tok/s",
        f"device busy {stats.busy_s / seconds:.1%}" if monitor.is_recorded else "not recorded",
        f"{stats.num_overrun} wasted tokens",
        f"depth {monitor.depth}" + ("" if monitor.depth_is_final else " (still measuring)"),
    ]
    if stats.num_forced:
        parts.append(f"{stats.num_forced} token{'' if stats.num_forced == 1 else 's'} without a step of their own")
    if stats.num_cached_tokens:
        parts.append(f"{stats.num_cached_tokens / max(stats.num_prompt_tokens, 1):.0%} of prompt tokens cached")
    reasons = [f"{reason} ({count})" for reason, count in monitor.ledger().items()]
    parts += reasons[:MOST_REASONS]
    if len(reasons) > MOST_REASONS:
        parts.append(f"and {len(reasons) - MOST_REASONS} more of the ledger")
    parts.append(f"peak memory {readable_bytes(peak_memory())}")
    return "overlap: " + ", ".join(parts)


def idle_line(idle: Mapping[str, float], seconds: float, top: int = TOP_CAUSES) -> str:
    """Why the device idled, the largest causes first, in one line."""
    causes = sorted((item for item in idle.items() if item[1] > 0), key=lambda item: -item[1])
    total = sum(spent for _, spent in causes)
    if total <= 0:
        return "idle: none"
    parts = [f"{cause} {readable_s(spent)}" for cause, spent in causes[:top]]
    if rest := sum(spent for _, spent in causes[top:]):
        parts.append(f"other {readable_s(rest)}")
    return f"idle: {readable_s(total)} ({total / max(seconds, 1e-9):.1%}): " + ", ".join(parts)


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
