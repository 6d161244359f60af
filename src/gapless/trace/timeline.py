"""One run's timeline as a value: its columns, and figures derived from them.

Made by the recorder, shown by `perfetto`, `page` and `text`. Can be saved and loaded, so that one file can have the
runs of several processes.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from gapless.trace.causes import CAUSES, Seconds, attribute, gaps
from gapless.trace.columns import (
    COMMIT,
    DELIVER,
    IDLE,
    PHASE_MASK,
    PHASES,
    Collections,
    Ints,
    Marks,
    Steps,
    Times,
)

COLUMN_SETS = {"steps": Steps, "marks": Marks, "collections": Collections}
VISIBLE_GAP_S = 5e-6  # a shorter gap is not counted as one


@dataclass(frozen=True)
class Timeline:
    """A period of one engine's time."""

    label: str
    began: float
    ended: float
    steps: Steps
    marks: Marks
    collections: Collections
    facts: dict[str, Any] = field(default_factory=dict)  # further facts about the run: depth, device, counters

    @property
    def seconds(self) -> float:
        return max(self.ended - self.began, 1e-9)

    @cached_property
    def idle(self) -> Seconds:
        """Seconds by step and cause."""
        return attribute(self.steps, self.marks, self.collections, self.began)

    @cached_property
    def gaps(self) -> tuple[Times, Times]:
        """Begin and end of the idle time before each step."""
        return gaps(self.steps, self.began)

    @cached_property
    def idle_by_cause(self) -> dict[str, float]:
        """Seconds by cause, the largest first, without causes that did not occur."""
        total = self.idle.sum(axis=0)
        order = np.argsort(-total, kind="stable")
        return {CAUSES[i]: float(total[i]) for i in order if total[i] > 0}

    @property
    def inside_s(self) -> float:
        """Idle time within steps."""
        return float(self.steps.idle_inside.sum())

    @property
    def busy_s(self) -> float:
        return float(np.nansum(self.steps.compute_end - self.steps.compute_begin)) - self.inside_s

    @property
    def idle_s(self) -> float:
        """Of the compute stream, before the last step's end."""
        return float(self.idle.sum())

    @property
    def idle_share(self) -> float:
        """Of the time from the first step's start to the last step's end."""
        begin, end = self.gaps
        idle = float((end - begin)[1:].sum()) + self.inside_s
        return idle / max(idle + self.busy_s, 1e-9)

    @property
    def num_generated(self) -> int:
        """Tokens that reached their requests; all sampled tokens where that is not known."""
        return int(self.facts.get("num_generated", self.steps.num_rows.sum()))

    @property
    def tokens_per_s(self) -> float:
        return self.num_generated / self.seconds

    @property
    def num_gaps(self) -> int:
        begin, end = self.gaps
        return int((end - begin > VISIBLE_GAP_S).sum())

    @property
    def phase_ends(self) -> Times:
        return np.append(self.marks.time[1:], self.ended)[: len(self.marks)]

    @property
    def phase_steps(self) -> Ints:
        """The step that each host phase worked for; 0 where there is none."""
        steps, marks = self.steps, self.marks
        phase = marks.code & PHASE_MASK
        ahead = np.searchsorted(steps.queued, marks.time)  # admit, schedule, fill, launch: for the next one queued
        behind = np.searchsorted(steps.collected, marks.time, "right")  # collect: for the next one to come back
        index = np.where(phase < PHASES.index("collect"), ahead, behind)
        index = np.where((phase == COMMIT) | (phase == DELIVER), behind - 1, index)
        known = (index >= 0) & (index < len(steps)) & (phase != IDLE)
        number: Ints = np.zeros(len(marks), np.int32)
        number[known] = steps.step[index[known]]
        return number

    def trimmed(self) -> Timeline:
        """Without the waits for requests before the first step and after the last."""
        if len(self.steps) == 0:
            return self
        working = np.flatnonzero((self.marks.code & PHASE_MASK) != IDLE)
        first = float(self.marks.time[working[0]]) if len(working) else self.began
        last = float(self.phase_ends[working[-1]]) if len(working) else self.ended
        return cut(self, max(first, self.began), max(last, float(np.nanmax(self.steps.d2h_end))))

    def lanes(self, zero: float) -> dict[str, list[list[Any]]]:
        """The four lanes as plain lists of [begin, end, name, step], times relative to `zero`."""
        names = [PHASES[code] for code in (self.marks.code & PHASE_MASK).tolist()]
        host = zip(
            _list(self.marks.time, zero), _list(self.phase_ends, zero), names, self.phase_steps.tolist(), strict=True
        )
        s = self.steps
        return {
            "cpu": [list(span) for span in host if span[2] != PHASES[IDLE]],
            "h2d": _spans(s.h2d_begin, s.h2d_end, "copy in", s.step, zero),
            "gpu": _spans(s.compute_begin, s.compute_end, "compute", s.step, zero),
            "d2h": _spans(s.d2h_begin, s.d2h_end, "copy out", s.step, zero),
        }

    def save(self, place: Path | IO[bytes]) -> None:
        """Write it for programs, to a file or a stream."""
        columns = {
            f"{name}.{f.name}": getattr(getattr(self, name), f.name)
            for name, kind in COLUMN_SETS.items()
            for f in fields(kind)
        }
        head = json.dumps([self.label, self.began, self.ended, self.facts])
        with place.open("wb") if isinstance(place, Path) else contextlib.nullcontext(place) as file:
            np.savez(file, head=np.array(head), **columns)


def load(place: Path | IO[bytes]) -> Timeline:
    """Read what `save` wrote."""
    with np.load(place) as file:
        label, began, ended, facts = json.loads(str(file["head"]))
        parts: list[Any] = [
            kind(*(file[f"{name}.{f.name}"] for f in fields(kind))) for name, kind in COLUMN_SETS.items()
        ]
    return Timeline(label, began, ended, parts[0], parts[1], parts[2], facts)


def cut(timeline: Timeline, since: float, until: float | None = None) -> Timeline:
    """The part between two moments: steps that ran in it, and host phases from the first moment on."""
    until = timeline.ended if until is None else until
    inside = np.flatnonzero((timeline.steps.collected >= since) & (timeline.steps.queued <= until))
    steps = timeline.steps.part(int(inside[0]), int(inside[-1]) + 1) if len(inside) else timeline.steps.part(0, 0)
    times = timeline.marks.time
    first, last = max(int(np.searchsorted(times, since, "right")) - 1, 0), int(np.searchsorted(times, until))
    marks = timeline.marks.part(first, last)
    if len(marks) and marks.time[0] < since:
        marks = replace(marks, time=np.concatenate(([since], marks.time[1:])))
    found = timeline.collections
    kept = (found.end > since) & (found.begin < until)
    collections = Collections(found.begin[kept], found.end[kept], found.is_own[kept])
    return replace(timeline, began=since, ended=until, steps=steps, marks=marks, collections=collections)


def _list(times: Times, zero: float) -> list[float]:
    found: list[float] = np.round(times - zero, 9).tolist()
    return found


def _spans(begin: Times, end: Times, name: str, step: Ints, zero: float) -> list[list[Any]]:
    rows = zip(_list(begin, zero), _list(end, zero), step.tolist(), strict=True)
    return [[b, e, name, number] for b, e, number in rows if e >= b]  # not NaN
