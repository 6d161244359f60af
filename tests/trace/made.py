"""Timelines made by hand or by a small model of the pipeline, so that what is in them is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gapless.trace.columns import (
    ADMIT,
    COLLECT,
    COMMIT,
    DELIVER,
    FILL,
    INSIDE,
    LAUNCH,
    SCHEDULE,
    Collections,
    Marks,
    Steps,
)
from gapless.trace.timeline import Timeline

NAN = float("nan")
NO_COLLECTIONS = Collections(np.empty(0), np.empty(0), np.empty(0, np.uint8))
Span = tuple[float, float]


def make_steps(
    computes: Sequence[Span],
    *,
    queued: Sequence[float] | None = None,
    copies: Sequence[Span] | None = None,
    flags: Sequence[int] | None = None,
    inside: Sequence[Sequence[float]] | None = None,
) -> Steps:
    """Steps of one row with these computations; unless said otherwise queued and copied just before."""
    n = len(computes)
    begin, end = (np.array([span[i] for span in computes], float) for i in range(2))
    ready = begin if queued is None else np.array(queued, float)
    copied = [(t, t) for t in ready] if copies is None else copies
    ones = np.ones(n, np.int32)
    return Steps(
        step=np.arange(1, n + 1, dtype=np.int32),
        num_rows=ones,
        num_tokens=ones,
        num_blocks=0 * ones,
        in_flight=ones,
        flags=np.array(flags or [0] * n, np.uint8),
        queued=ready,
        collected=end,
        h2d_begin=np.array([span[0] for span in copied], float),
        h2d_end=np.array([span[1] for span in copied], float),
        compute_begin=begin,
        compute_end=end,
        d2h_begin=end,
        d2h_end=end,
        **_idle_inside(inside or [(0, 0, 0, 0)] * n),
    )


def _idle_inside(rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    columns = np.array(rows, float).reshape(-1, len(INSIDE)).T
    return {f"idle_{cause}": column for cause, column in zip(INSIDE, columns, strict=True)}


def make_marks(*marks: tuple[float, int], cpu: Sequence[float] | None = None) -> Marks:
    """Phases as (begin, code)."""
    times, codes = zip(*marks, strict=True)
    readings = [NAN] * len(marks) if cpu is None else cpu
    return Marks(np.array(times, float), np.array(codes, np.uint8), np.array(readings, float))


HOST_S = ((COMMIT, 40e-6), (DELIVER, 15e-6), (ADMIT, 8e-6), (SCHEDULE, 55e-6), (FILL, 12e-6), (LAUNCH, 70e-6))
COPY_S, BACK_S = 6e-6, 25e-6


def simulated(num_steps: int, depth: int, *, step_s: float = 1.6e-3, seed: int = 0, **facts: Any) -> Timeline:
    """What an engine of this depth would record whose host takes 0.2 ms a step."""
    draw = np.random.default_rng(seed)
    took = step_s * draw.normal(1, 0.02, num_steps).clip(0.5, 2)
    host = draw.gamma(8, 1 / 8, (num_steps, len(HOST_S)))
    now, busy_until = 0.0, 0.0
    marks: list[tuple[float, int]] = []
    rows: list[tuple[float, ...]] = []
    num_collected = 0
    collected: list[float] = []
    for i in range(num_steps):
        for phase, seconds in HOST_S[2:]:
            marks.append((now, phase))
            now += seconds * host[i, phase % len(HOST_S)]
        copied = now - 30e-6
        begin = max(copied + COPY_S, busy_until)
        busy_until = begin + took[i]
        rows.append((now, copied, copied + COPY_S, begin, busy_until, busy_until, busy_until + 5e-6))
        while len(rows) - num_collected >= depth or (i == num_steps - 1 and num_collected < num_steps):
            marks.append((now, COLLECT))
            now = max(now, rows[num_collected][-1] + BACK_S)
            collected.append(now)
            num_collected += 1
            for phase, seconds in HOST_S[:2]:
                marks.append((now, phase))
                now += seconds * host[i, phase % len(HOST_S)]
    queued, h2d_b, h2d_e, begin_, end_, d2h_b, d2h_e = (np.array(column) for column in zip(*rows, strict=True))
    batch = (32 - 24 * (np.arange(num_steps) / num_steps) ** 6).astype(np.int32)
    steps = Steps(
        step=np.arange(1, num_steps + 1, dtype=np.int32),
        num_rows=batch,
        num_tokens=batch,
        num_blocks=np.zeros(num_steps, np.int32),
        in_flight=np.full(num_steps, depth, np.int32),
        flags=np.zeros(num_steps, np.uint8),
        queued=queued,
        collected=np.array(collected),
        h2d_begin=h2d_b,
        h2d_end=h2d_e,
        compute_begin=begin_,
        compute_end=end_,
        d2h_begin=d2h_b,
        d2h_end=d2h_e,
        **_idle_inside([(0, 0, 0, 0)] * num_steps),
    )
    known = {"depth": depth, "device": "cuda", "model": "simulated", "num_overrun": 0, "ledger": {}, **facts}
    return Timeline(f"depth {depth}", 0.0, now, steps, make_marks(*marks), NO_COLLECTIONS, known)
