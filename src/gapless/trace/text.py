"""Timelines in a terminal: four lanes of characters, at a scale at which gaps are visible.

A gap may be a hundredth of a step. So the gaps determine the window: it shows several steps where gaps are wide enough,
and otherwise the surroundings of the most typical gap of the run. All runs have the same scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gapless.trace.columns import COLLECT, IDLE, PHASE_MASK, Times
from gapless.trace.timeline import VISIBLE_GAP_S, Timeline

LABEL_WIDTH = 5
GAP_CHARACTERS = 9  # the least width of a typical gap
MOST_STEPS = 4.0  # in the window


@dataclass(frozen=True, slots=True)
class Style:
    """Characters by how much of their time is covered, from nothing to all, and one for a waiting host."""

    shades: str
    waits: str


BLOCKS = Style(" ░▒▓█", "·")
ASCII = Style(" .-=#", "~")


def style_for(encoding: str | None) -> Style:
    """Blocks where they can be printed."""
    try:
        BLOCKS.shades.encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return ASCII
    return BLOCKS


def draw(timelines: Sequence[Timeline], width: int, style: Style) -> str:
    """All runs, one below the other, with the scale."""
    cells = max(width - LABEL_WIDTH, 20)
    window = window_s(timelines[0], cells)
    parts = [_lanes(timeline, window, cells, style) for timeline in timelines]
    scale = f"window {readable_s(window)}, one character {readable_s(window / cells)}"
    legend = f"{style.shades[-1]} works   {style.waits} the host waits for the device   (blank) idle"
    return "\n\n".join([*parts, f"{scale}\n{legend}"])


def readable_s(seconds: float) -> str:
    """A duration for people, such as 1.5 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def window_s(timeline: Timeline, cells: int) -> float:
    """A window in which a typical gap is a few characters wide, and at most a few steps fit."""
    if len(timeline.steps) < 2:
        return timeline.seconds
    period = float(np.nanmedian(np.diff(timeline.steps.compute_begin)))
    gap = _lengths(timeline)[_ordinary(timeline)]
    most = MOST_STEPS * max(period, 1e-6)
    return min(gap * cells / GAP_CHARACTERS, most) if gap > VISIBLE_GAP_S else most


def _lengths(timeline: Timeline) -> Times:
    begin, end = timeline.gaps
    return end - begin


def _ordinary(timeline: Timeline) -> int:
    """The step with the most typical gap before it, among those in the middle of the run."""
    n = len(timeline.steps)
    middle = np.arange(max(n // 4, 1), max(n - n // 4, 2))
    lengths = _lengths(timeline)[middle]
    return int(middle[np.argmin(np.abs(lengths - np.median(lengths)))])


def _lanes(timeline: Timeline, window: float, cells: int, style: Style) -> str:
    begin, end = timeline.gaps
    step = _ordinary(timeline) if len(timeline.steps) > 1 else 0
    middle = (begin[step] + end[step]) / 2 if len(timeline.steps) else timeline.began
    edges = np.linspace(middle - window / 2, middle + window / 2, cells + 1)
    s = timeline.steps
    rows = {
        "CPU": _host(timeline, edges, style),
        "H2D": _shades(_shares(s.h2d_begin, s.h2d_end, edges), style),
        "GPU": _shades(_shares(s.compute_begin, s.compute_end, edges), style),
        "D2H": _shades(_shares(s.d2h_begin, s.d2h_end, edges), style),
    }
    return "\n".join([timeline.label, *(f"{name:{LABEL_WIDTH}}{cells}" for name, cells in rows.items())])


def _host(timeline: Timeline, edges: Times, style: Style) -> str:
    phase = timeline.marks.code & PHASE_MASK
    begin, end = timeline.marks.time, timeline.phase_ends
    waits, works = phase == COLLECT, (phase != COLLECT) & (phase != IDLE)
    working = _shares(begin[works], end[works], edges)
    waiting = _shares(begin[waits], end[waits], edges)
    shades = _shades(working, style)
    return "".join(
        style.waits if w > v else c for c, w, v in zip(shades, waiting.tolist(), working.tolist(), strict=True)
    )


def _shares(begin: Times, end: Times, edges: Times) -> Times:
    """How much of each cell the spans cover."""
    known = ~np.isnan(begin) & ~np.isnan(end)
    begin, end = begin[known], end[known]
    if len(begin) == 0:
        return np.zeros(len(edges) - 1)
    corners = np.stack((begin, end), axis=1).reshape(-1)
    total = np.stack((np.zeros(len(begin)), end - begin), axis=1).reshape(-1).cumsum()
    shares: Times = np.diff(np.interp(edges, corners, total)) / np.diff(edges)
    return shares


def _shades(shares: Times, style: Style) -> str:
    last = len(style.shades) - 1
    # any coverage shows, and only an almost whole one is full
    levels = np.where(shares <= 0.01, 0, np.clip(np.floor(shares * (last + 0.12)), 1, last)).astype(int)
    return "".join(style.shades[level] for level in levels)
