"""`gapless compare`: the same prompts at several depths, and both timelines in the terminal."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gapless.commands.trace import Recorded, record_all, tell_errors
from gapless.config import EngineOptions
from gapless.errors import ConfigError
from gapless.trace.files import TraceFiles
from gapless.trace.text import BLOCKS, draw, readable_s, style_for
from gapless.trace.timeline import Timeline

LEAST_WIDTH = 20  # characters


def compare(args: argparse.Namespace, options: EngineOptions, sampling: Mapping[str, Any]) -> int:
    """Run, draw, and put the numbers side by side."""
    if args.width is not None and args.width < LEAST_WIDTH:
        raise ConfigError(f"width must be at least {LEAST_WIDTH}, got {args.width}")
    files = TraceFiles.at(args.trace) if args.trace is not None else None
    runs = record_all(args.prompts, options, sampling, args.depth)
    if files is not None:
        files.write([run.timeline for run in runs])
    if not runs[-1].is_whole:
        raise KeyboardInterrupt
    width = args.width or shutil.get_terminal_size((100, 24)).columns
    style = style_for(sys.stdout.encoding)
    lines = [
        draw([run.timeline for run in runs], width, style),
        "",
        table([run.timeline for run in runs]),
        "",
        equal(runs),
        *([f"timeline: {files}"] if files is not None else []),
    ]
    print("\n".join(lines) if style is BLOCKS else "\n".join(lines).replace("µ", "u"))
    return tell_errors(runs)


def table(timelines: Sequence[Timeline]) -> str:
    """A row a figure, a column a run; the last column is the last run over the first."""
    rows: list[tuple[str, Callable[[Timeline], float], Callable[[float], str]]] = [
        ("tokens/s", lambda t: t.tokens_per_s, lambda x: f"{x:.1f}"),
        ("GPU idle", lambda t: t.idle_share, lambda x: f"{x:.2%}"),
        ("idle gaps", lambda t: t.num_gaps, lambda x: f"{x:.0f}"),
        ("steps", lambda t: len(t.steps), lambda x: f"{x:.0f}"),
        ("wasted tokens", lambda t: t.facts["num_overrun"], lambda x: f"{x:.0f}"),
        ("time", lambda t: t.seconds, readable_s),
    ]
    head = ["", *(timeline.label for timeline in timelines), *(["ratio"] if len(timelines) > 1 else [])]
    cells = [head]
    for name, of, show in rows:
        values = [of(timeline) for timeline in timelines]
        ratio = f"{values[-1] / values[0]:.2f}" if values[0] else ""
        cells.append([name, *(show(value) for value in values), *([ratio] if len(timelines) > 1 else [])])
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return "\n".join("  ".join(_pad(row, widths)).rstrip() for row in cells)


def _pad(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]


def equal(runs: Sequence[Recorded]) -> str:
    """Whether all runs gave the same tokens, where none of them failed."""
    first = runs[0].tokens
    whole = [index for index in first if all(index not in run.errors for run in runs)]
    same = [index for index in whole if all(run.tokens[index] == first[index] for run in runs)]
    kind = "prompts" if len(whole) == len(first) else "prompts that no run failed"
    if len(same) == len(whole):
        return f"tokens: equal in all {len(whole)} {kind}"
    reason = "rounding may depend on the batch, but not with --dtype float32"
    return f"tokens: equal in {len(same)} of {len(whole)} {kind}; {reason}"
