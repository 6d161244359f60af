"""Timelines as a Chrome trace-event file, which Perfetto's viewer and chrome://tracing open.

A run is a process, a lane is a thread. A fifth lane holds the idle time of the compute stream, each gap named after its
largest cause. Times are microseconds from the run's begin. Written piece by piece: a long run is never one string.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import numpy as np

from gapless.trace.causes import CAUSES
from gapless.trace.columns import EAGER, PREEMPTED
from gapless.trace.timeline import VISIBLE_GAP_S, Timeline

LANE_NAMES = {"cpu": "CPU", "h2d": "H2D", "gpu": "GPU", "d2h": "D2H"}
IDLE_LANE = 5
COUNTER_STEPS = 32  # that one reading of tokens/s covers


def write(timelines: Sequence[Timeline], file: TextIO) -> None:
    """Write the file."""
    file.write('{"displayTimeUnit":"ms","otherData":')
    file.write(json.dumps({"producer": "gapless", "runs": [summary(timeline) for timeline in timelines]}))
    file.write(',"traceEvents":[')
    separator = "\n"
    for pid, timeline in enumerate(timelines, start=1):
        for event in events(timeline, pid):
            file.write(separator + event)
            separator = ",\n"
    file.write("\n]}\n")


def summary(timeline: Timeline) -> dict[str, Any]:
    """What a run comes to, in numbers: the same as on the page."""
    return {
        "label": timeline.label,
        "seconds": timeline.seconds,
        "steps": len(timeline.steps),
        "tokens": timeline.num_generated,
        "tokens_per_s": timeline.tokens_per_s,
        "busy_s": timeline.busy_s,
        "idle_s": timeline.idle_s,
        "idle_share": timeline.idle_share,
        "gaps": timeline.num_gaps,
        "idle_by_cause": timeline.idle_by_cause,
        **timeline.facts,
    }


def events(timeline: Timeline, pid: int) -> Iterator[str]:
    """Every event of a run, as JSON: names, spans, idle gaps, counters."""
    yield _name("process_name", pid, 0, timeline.label)
    yield f'{{"ph":"M","name":"process_sort_index","pid":{pid},"tid":0,"args":{{"sort_index":{pid}}}}}'
    for tid, (lane, spans) in enumerate(timeline.lanes(timeline.began).items(), start=1):
        yield _name("thread_name", pid, tid, LANE_NAMES[lane])
        details = _details(timeline) if lane == "gpu" else {}
        for begin, end, name, step in spans:
            label = f"step {step}" if lane == "gpu" else name
            yield _span(label, pid, tid, begin, end, f'"step":{step}{details.get(step, "")}')
    yield _name("thread_name", pid, IDLE_LANE, "GPU idle, by cause")
    yield from _idle(timeline, pid)
    yield from _counters(timeline, pid)


def _details(timeline: Timeline) -> dict[int, str]:
    """More words about each step."""
    s = timeline.steps
    columns = (s.step, s.num_rows, s.num_tokens, s.in_flight, s.flags)
    return {
        step: f',"batch":{batch},"tokens":{tokens},"in_flight":{in_flight}{_flags(flags)}'
        for step, batch, tokens, in_flight, flags in zip(*(column.tolist() for column in columns), strict=True)
    }


def _flags(flags: int) -> str:
    named = {EAGER: "without_graph", PREEMPTED: "preempted"}
    return "".join(f',"{name}":true' for flag, name in named.items() if flags & flag)


def _idle(timeline: Timeline, pid: int) -> Iterator[str]:
    begin, end = timeline.gaps
    seconds = timeline.idle
    order = np.argsort(-seconds, axis=1)
    for i in np.flatnonzero(end - begin > VISIBLE_GAP_S).tolist():
        split = [(CAUSES[c], float(seconds[i, c])) for c in order[i].tolist() if seconds[i, c] > 0]
        parts = ",".join(f'"{cause}":{spent * 1e6:.3f}' for cause, spent in split)
        args = f'"before_step":{timeline.steps.step[i]},"us_by_cause":{{{parts}}}'
        yield _span(split[0][0], pid, IDLE_LANE, begin[i] - timeline.began, end[i] - timeline.began, args)


def _counters(timeline: Timeline, pid: int) -> Iterator[str]:
    s = timeline.steps
    for begin, batch in zip((s.compute_begin - timeline.began).tolist(), s.num_rows.tolist(), strict=True):
        if begin == begin:  # not NaN
            yield _counter("batch size", pid, begin, "rows", batch)
    for i in range(0, len(s) - COUNTER_STEPS, COUNTER_STEPS):
        seconds = float(s.compute_end[i + COUNTER_STEPS] - s.compute_end[i])
        if seconds > 0:
            tokens = int(s.num_rows[i + 1 : i + COUNTER_STEPS + 1].sum())
            yield _counter("tokens/s", pid, float(s.compute_end[i] - timeline.began), "tokens/s", tokens / seconds)


def _name(kind: str, pid: int, tid: int, name: str) -> str:
    return f'{{"ph":"M","name":"{kind}","pid":{pid},"tid":{tid},"args":{{"name":{json.dumps(name)}}}}}'


def _span(name: str, pid: int, tid: int, begin: float, end: float, args: str) -> str:
    return (
        f'{{"ph":"X","name":"{name}","pid":{pid},"tid":{tid},'
        f'"ts":{begin * 1e6:.3f},"dur":{(end - begin) * 1e6:.3f},"args":{{{args}}}}}'
    )


def _counter(name: str, pid: int, moment: float, unit: str, value: float) -> str:
    return f'{{"ph":"C","name":"{name}","pid":{pid},"ts":{moment * 1e6:.3f},"args":{{"{unit}":{value:.1f}}}}}'
