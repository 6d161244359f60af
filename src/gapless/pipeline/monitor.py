"""The figures of a running engine: counters, load, waste, idle time by cause, the timeline.

Reads what the loop's thread writes, and writes nothing. Any thread may ask; a reading may be a step old.
"""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from gapless.config import EngineOptions
from gapless.pipeline.assembly import Assembly
from gapless.pipeline.readings import Load, Stats
from gapless.trace.timeline import Timeline


class Monitor:
    """The figures of an engine. They can still be read after it is closed."""

    def __init__(self, options: EngineOptions, parts: Assembly) -> None:
        self._options = options
        self._built = parts.built
        self._scheduler = parts.scheduler
        self._depth = parts.depth
        self._recorder = parts.recorder

    @property
    def depth(self) -> int:
        """Steps that may be in flight, now."""
        return self._depth.depth

    @property
    def depth_is_final(self) -> bool:
        """False while "auto" is still trying."""
        return self._depth.decided

    @property
    def is_recorded(self) -> bool:
        """False where nothing is known of times, so that nothing is busy and nothing idles."""
        return self._options.record

    def stats(self) -> Stats:
        """All counters, now."""
        counters = self._scheduler.counters
        values = (getattr(counters, f.name) for f in fields(counters))
        return Stats(time.perf_counter(), self._recorder.busy_s, *values)

    def load(self) -> Load:
        """Requests that run or wait, and KV blocks in use, now."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        return Load(scheduler.num_running, scheduler.num_waiting, pool.num_used, pool.num_blocks)

    def ledger(self) -> dict[str, int]:
        """How often a fast path was missed or overlap reduced, or something came only after the engine was ready."""
        found = {**self._built.runner.ledger, **self._recorder.ledger}  # copied at once: the loop may add a reason
        found |= {f"held: {reason}": count for reason, count in dict(self._scheduler.holds.counts).items()}
        if self._depth.num_reduced:
            found["depth reduced"] = self._depth.num_reduced
        return found | self._built.device.late.ledger()

    def after_ready(self) -> list[str]:
        """The last compilations, loads and allocations after the engine was ready, each with its step."""
        return list(self._built.device.late.notes)

    def kernels(self) -> dict[str, int]:
        """Kernels until the engine was ready, by how they were had: compiled, found in the cache, loaded."""
        return dict(self._built.device.late.built)

    def waste(self) -> dict[str, int]:
        """The cost of asynchrony: tokens sampled past a stop not yet known, KV blocks held for steps in flight.

        And that of captured steps: tokens computed only to fill up their shapes.
        """
        return {
            "wasted_tokens": self._scheduler.counters.num_overrun,
            "padding_tokens": self._built.runner.num_padding,
            "blocks_in_flight": self._recorder.num_blocks_in_flight,
            "max_blocks_in_flight": self._recorder.max_blocks_in_flight,
        }

    def idle_by_cause(self) -> dict[str, float]:
        """Seconds that the compute stream idled so far, for every cause there is. Only grows."""
        return self._recorder.idle_by_cause()

    def timeline_tail(self, seconds: float) -> dict[str, Any]:
        """The last seconds of the lanes "cpu", "h2d", "gpu" and "d2h": lists of [begin, end, name, step].

        Times are in seconds before now, so below 0. Plain lists and numbers, ready for JSON.
        """
        return self._recorder.tail(seconds)

    def timeline(self, label: str = "", before: Stats | None = None) -> Timeline:
        """The timeline since an earlier reading: with `trace` all of it, else the last few thousand steps."""
        stats = self.stats() if before is None else self.stats() - before
        facts = {
            "depth": self.depth,
            "device": self._built.resolved.device_name,
            "model": Path(self._options.model).name,
            "num_generated": stats.num_generated,
            "num_prompt_tokens": stats.num_prompt_tokens,
            "num_overrun": stats.num_overrun,
            "num_preemptions": stats.num_preemptions,
            "max_blocks_in_flight": self._recorder.max_blocks_in_flight,
            "ledger": self.ledger(),
            "after_ready": self.after_ready(),
        }
        found = f" ({self.depth})" if self._options.depth == "auto" else ""  # others were tried in the same run
        name = label or f"depth {self._options.depth}{found}"
        return self._recorder.timeline(name, None if before is None else before.time_s, **facts)

    def device_memory(self) -> int:
        """Bytes of device memory in use at most so far; 0 on a CPU."""
        return self._built.device.memory_held()

    def capture_cost(self) -> str:
        """The cost of capturing graphs at the start, in words; empty where there are none."""
        return self._built.capture_cost

    def attention(self) -> str:
        """Which attention runs and why, in words; empty where there was no choice."""
        return self._built.attention
