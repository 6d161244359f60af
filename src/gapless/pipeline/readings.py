"""Readings of a running engine: its counters, its load, its pulse. Values, without behaviour."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Stats:
    """A reading of all counters. The difference of two readings describes the time between them."""

    time_s: float
    busy_s: float  # the compute stream's
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated: int
    num_forced: int
    num_overrun: int
    num_preemptions: int
    num_recomputed: int

    def __sub__(self, earlier: Stats) -> Stats:
        return Stats(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Pulse:
    """Whether the loop moves: a turn counter that stands still while it waits for a step or, idle, for requests."""

    num_turns: int
    idle: bool


@dataclass(frozen=True, slots=True)
class Load:
    """The requests and blocks of the moment."""

    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_blocks: int
