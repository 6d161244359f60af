"""The report: one HTML file with the timelines in it, drawn by its own script, without network.

Times are packed columns, so that a hundred thousand steps open at once. The appearance is in `assets/`. The figures are
those of the trace file, from the same function.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.trace.causes import CAUSES
from gapless.trace.columns import PHASE_MASK, PHASES
from gapless.trace.perfetto import summary
from gapless.trace.timeline import Timeline


def render(timelines: Sequence[Timeline], title: str) -> str:
    """The whole page."""
    data = {"title": title, "phases": PHASES, "runs": [_run(timeline) for timeline in timelines]}
    packed = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # the text sits inside a script element
    page = _asset("page.html")
    for name in ("page.css", "columns.js", "panel.js", "page.js"):
        page = page.replace(f"<!-- {name} -->", _asset(name))
    page = page.replace("<!-- data -->", packed)
    return page.replace("<!-- title -->", title.replace("&", "&amp;").replace("<", "&lt;"))


def _run(timeline: Timeline) -> dict[str, Any]:
    idle = timeline.idle
    used = np.flatnonzero(idle.sum(axis=0) > 0)
    s, marks = timeline.steps, timeline.marks
    before, begin = timeline.gaps
    columns: dict[str, npt.NDArray[Any]] = {
        "step": s.step,
        "rows": s.num_rows,
        "tokens": s.num_tokens,
        "in_flight": s.in_flight.astype(np.uint8),
        "flags": s.flags,
        "gap": before - timeline.began,  # begin of the idle time before the step; it ends where the computation begins
        "gpu_begin": begin - timeline.began,
        "gpu_took": (np.fmax(s.compute_end, begin) - begin).astype(np.float32),
        **_copies("h2d", s.h2d_begin, s.h2d_end, timeline.began),
        **_copies("d2h", s.d2h_begin, s.d2h_end, timeline.began),
        "cpu_begin": marks.time - timeline.began,  # each phase ends where the next begins
        "cpu_phase": marks.code & PHASE_MASK,
        "cpu_step": timeline.phase_steps,
        "idle": idle[:, used].astype(np.float32).reshape(-1),  # by step, then by cause
    }
    return {
        "summary": summary(timeline),
        "causes": [CAUSES[i] for i in used],
        "columns": {name: _pack(column) for name, column in columns.items()},
    }


def _copies(lane: str, begin: npt.NDArray[Any], end: npt.NDArray[Any], zero: float) -> dict[str, npt.NDArray[Any]]:
    """Spans of a lane, in order; a missing span has no length and lies where the last one ended."""
    ends = np.fmax.accumulate(np.concatenate(([zero], end)))
    found = np.where(np.isnan(begin), ends[:-1], begin) - zero
    return {f"{lane}_begin": found, f"{lane}_took": np.maximum(ends[1:] - zero - found, 0).astype(np.float32)}


def _pack(column: npt.NDArray[Any]) -> list[str]:
    return [column.dtype.name, base64.b64encode(np.ascontiguousarray(column).tobytes()).decode()]


def _asset(name: str) -> str:
    return resources.files("gapless.trace").joinpath("assets", name).read_text(encoding="utf-8")
