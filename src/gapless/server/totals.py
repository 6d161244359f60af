"""Totals of the engines' counters: they go on when one engine takes over from another."""

from __future__ import annotations

from collections import Counter as Tally

from gapless.server.messages import EnginePulse


class EngineTotals:
    """The engine's counters, summed over the engines that there were."""

    def __init__(self) -> None:
        self._before: Tally[tuple[str, str]] = Tally()
        self._now: dict[tuple[str, str], float] = {}

    def observe(self, pulse: EnginePulse) -> None:
        now = {("stats", name): value for name, value in pulse.stats.items()}
        now |= {("ledger", reason): float(count) for reason, count in pulse.ledger.items()}
        self._now = now | {("idle", cause): seconds for cause, seconds in pulse.idle_s.items()}

    def engine_died(self) -> None:
        self._before.update(self._now)
        self._now = {}

    def add(self, others: EngineTotals) -> None:
        """Count what a different engine counted, which is no more."""
        self._before.update(others._before)
        self._before.update(others._now)

    def get(self, kind: str, name: str) -> float:
        return self._before[kind, name] + self._now.get((kind, name), 0.0)

    def names(self, kind: str) -> list[str]:
        return sorted({name for found, name in (*self._before, *self._now) if found == kind})
