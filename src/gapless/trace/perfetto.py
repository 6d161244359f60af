"""Timelines as a Chrome trace-event file, which Perfetto's viewer and chrome://tracing open.

A run is a process and a lane is a thread. A fifth lane holds the idle time of the compute stream, with each gap named
after its largest cause. Times are microseconds from the start of the run. The file is written piece by piece, so a long
run is never one string. Avoids what viewers drop silently: times below 0, and overlapping spans in a lane, even by a
nanosecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import numpy as np

from gapless.trace.causes import CAUSES, FIRST_INSIDE
from gapless.trace.columns import EAGER, INSIDE, PREEMPTED
from gapless.trace.timeline import VISIBLE_GAP_S, Timeline

LANE_NAMES = {"cpu": "CPU", "h2d": "H2D", "gpu": "GPU", "d2h": "D2H"}
IDLE_LANE = len(LANE_NAMES)
RUN_IDS = 10  # between the processes of two runs; the first lane has its process's id, as main threads do: shown first
NANOSECOND = 1e-9  # taken off each span: viewers truncate times to integers, and a span must end before the next
COUNTER_STEPS = 32  # that one reading of tokens/s covers


def write(timelines: Sequence[Timeline], file: TextIO) -> None:
    """Write the file."""
    file.write('{"displayTimeUnit":"ms","otherData":')
    file.write(json.dumps({"producer": "gapless", "runs": [summary(timeline) for timeline in timelines]}))
    file.write(',"traceEvents":[')
    separator = "\n"
    for number, timeline in enumerate(timelines, start=1):
        for event in events(timeline, number * RUN_IDS):
            file.write(separator + event)
            separator = ",\n"
    file.write("\n]}\n")


def summary(timeline: Timeline) -> dict[str, Any]:
    """The figures of a run: the same as on the page."""
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
    yield from _named("process", pid, pid, timeline.label)
    for tid, (lane, spans) in enumerate(timeline.lanes(timeline.began).items(), start=pid):
        yield from _named("thread", pid, tid, LANE_NAMES[lane])
        details = _details(timeline) if lane == "gpu" else {}
        until = 0.0
        for begin, end, name, step in spans:
            label = f"step {step}" if lane == "gpu" else name
            # after a correction of the GPU's clock between two steps, the second may begin a little too early
            yield _span(label, pid, tid, max(begin, until), end, f'"step":{step}{details.get(step, "")}')
            until = max(until, end)
    yield from _named("thread", pid, pid + IDLE_LANE, "GPU idle, by cause")
    yield from _idle(timeline, pid)
    yield from _counters(timeline, pid)


def _details(timeline: Timeline) -> dict[int, str]:
    """Further details of each step."""
    s = timeline.steps
    columns = (s.step, s.num_rows, s.num_tokens, s.in_flight, s.flags, s.idle_inside)
    return {
        step: f',"batch":{batch},"tokens":{tokens},"in_flight":{in_flight}{_flags(flags)}{_inside(idle)}'
        for step, batch, tokens, in_flight, flags, idle in zip(*(column.tolist() for column in columns), strict=True)
    }


def _inside(idle: list[float]) -> str:
    """The idle time within a step, if it had any."""
    parts = [f'"{cause}":{spent * 1e6:.3f}' for cause, spent in zip(INSIDE, idle, strict=True) if spent > 0]
    return f',"idle_us_by_cause":{{{",".join(parts)}}}' if parts else ""


def _flags(flags: int) -> str:
    named = {EAGER: "without_graph", PREEMPTED: "preempted"}
    return "".join(f',"{name}":true' for flag, name in named.items() if flags & flag)


def _idle(timeline: Timeline, pid: int) -> Iterator[str]:
    begin, end = timeline.gaps
    seconds = timeline.idle[:, :FIRST_INSIDE]
    order = np.argsort(-seconds, axis=1)
    for i in np.flatnonzero(end - begin > VISIBLE_GAP_S).tolist():
        split = [(CAUSES[c], float(seconds[i, c])) for c in order[i].tolist() if seconds[i, c] > 0]
        parts = ",".join(f'"{cause}":{spent * 1e6:.3f}' for cause, spent in split)
        args = f'"before_step":{timeline.steps.step[i]},"us_by_cause":{{{parts}}}'
        yield _span(split[0][0], pid, pid + IDLE_LANE, begin[i] - timeline.began, end[i] - timeline.began, args)


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


def _named(kind: str, pid: int, tid: int, name: str) -> Iterator[str]:
    """The name of a process or thread, and its place in the order of the ids."""
    head = f'"ph":"M","pid":{pid},"tid":{tid}'
    yield f'{{{head},"name":"{kind}_name","args":{{"name":{json.dumps(name)}}}}}'
    yield f'{{{head},"name":"{kind}_sort_index","args":{{"sort_index":{tid}}}}}'


def _span(name: str, pid: int, tid: int, begin: float, end: float, args: str) -> str:
    took = max(end - begin - NANOSECOND, 0)
    return (
        f'{{"ph":"X","name":"{name}","pid":{pid},"tid":{tid},'
        f'"ts":{begin * 1e6:.3f},"dur":{took * 1e6:.3f},"args":{{{args}}}}}'
    )


def _counter(name: str, pid: int, moment: float, unit: str, value: float) -> str:
    return f'{{"ph":"C","name":"{name}","pid":{pid},"ts":{max(moment, 0) * 1e6:.3f},"args":{{"{unit}":{value:.1f}}}}}'
