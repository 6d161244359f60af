"""From results to rows: medians, spreads and ratios, as a table for people and as values for JSON and the chart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gapless.bench.chart import ChartBar, Group
from gapless.bench.contest import Result
from gapless.bench.job import Overlap, Round
from gapless.report import idle_line

Tokens = list[list[int]] | None


@dataclass(frozen=True, slots=True)
class TableRow:
    """One contender at one batch size. Speeds count output tokens over the whole round, prefill included."""

    engine: str
    version: str
    weights: str
    batch: int
    is_ours: bool
    load_s: float
    error: str | None = None  # nothing below is set then
    tokens_per_s: float = 0.0  # of the median round
    tokens_per_s_min: float = 0.0
    tokens_per_s_max: float = 0.0
    seconds: float = 0.0  # of the median round
    round_s: tuple[float, ...] = ()
    peak_bytes: int = 0
    same_tokens: float | None = None  # share of prompts with the tokens of Gapless's first row in the same weights
    vs_gapless: float | None = None  # this speed over that of Gapless's first row
    overlap: Overlap | None = None  # of the median round


def make_rows(results: Sequence[Result], num_tokens: int) -> list[TableRow]:
    """A row for each result; ratios are against Gapless at the same batch size."""
    return [_row(result, [other for other in results if other.batch == result.batch], num_tokens) for result in results]


def _row(result: Result, rivals: Sequence[Result], num_tokens: int) -> TableRow:
    row = TableRow(
        engine=result.contender.label,
        version=result.version,
        weights=result.weights,
        batch=result.batch,
        is_ours=result.contender.name == "gapless",
        load_s=result.load_s,
        error=result.error,
    )
    ours = [other for other in rivals if other.contender.name == "gapless" and other.error is None]
    return row if result.error is not None else _measured(row, result, ours, num_tokens)


def _measured(row: TableRow, result: Result, ours: Sequence[Result], num_tokens: int) -> TableRow:
    median = _median(result.rounds)
    times = tuple(item.seconds for item in result.rounds)
    alike = [other for other in ours if other.weights.lower() == result.weights.lower()]
    return replace(
        row,
        tokens_per_s=num_tokens / median.seconds,
        tokens_per_s_min=num_tokens / max(times),
        tokens_per_s_max=num_tokens / min(times),
        seconds=median.seconds,
        round_s=times,
        peak_bytes=max(item.peak_bytes for item in result.rounds),
        same_tokens=_same(median.tokens, alike[0].rounds[0].tokens) if alike else None,
        vs_gapless=_median(ours[0].rounds).seconds / median.seconds if ours else None,
        overlap=median.overlap,
    )


def _median(rounds: Sequence[Round]) -> Round:
    """The round in the middle; the slower one of an even number."""
    middle = statistics.median_high(item.seconds for item in rounds)
    return next(item for item in rounds if item.seconds == middle)


def _same(tokens: Tokens, reference: Tokens) -> float | None:
    if tokens is None or reference is None:
        return None
    return sum(a == b for a, b in zip(tokens, reference, strict=True)) / len(reference)


def format_rows(rows: Sequence[TableRow]) -> str:
    """The table of speeds."""
    head = ["engine", "weights", "batch", "tok/s", "min-max", "seconds", "load s", "peak MiB", "same", "vs gapless"]
    return _format(head, [_cells(row) for row in rows if row.error is None])


def format_overlap(rows: Sequence[TableRow]) -> str:
    """The table of Gapless's steps."""
    head = ["overlap", "weights", "batch", "depth used", "steps", "device busy", "host busy", "wasted tokens"]
    lines = [
        [
            row.engine,
            row.weights,
            str(row.batch),
            str(row.overlap.depth),
            str(row.overlap.num_steps),
            f"{row.overlap.device_share:.1%}",
            _or_dash(row.overlap.host_share, "{:.1%}"),
            str(row.overlap.num_wasted),
        ]
        for row in rows
        if row.overlap is not None
    ]
    return _format(head, lines) if lines else ""


def format_idle(rows: Sequence[TableRow]) -> str:
    """A line for each of Gapless's rows: why its device idled."""
    return "\n".join(
        f"{row.engine}, {row.weights}, batch {row.batch}: {idle_line(row.overlap.idle_s, row.seconds)}"
        for row in rows
        if row.overlap is not None
    )


def _cells(row: TableRow) -> list[str]:
    return [
        row.engine,
        row.weights,
        str(row.batch),
        f"{row.tokens_per_s:.1f}",
        f"{row.tokens_per_s_min:.0f}-{row.tokens_per_s_max:.0f}",
        f"{row.seconds:.2f}",
        f"{row.load_s:.1f}",
        f"{row.peak_bytes / 2**20:.0f}",
        _or_dash(row.same_tokens, "{:.0%}"),
        _or_dash(row.vs_gapless, "{:.2f}x"),
    ]


def _or_dash(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def _format(head: list[str], lines: Sequence[list[str]]) -> str:
    """Columns as wide as their widest cell; the first two aligned left, numbers right."""
    table = [head, *lines]
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    )


def chart_groups(rows: Sequence[TableRow]) -> list[Group]:
    """Tokens a second, a group for each batch size. Rows that failed are left out."""
    shown = [row for row in rows if row.error is None]
    groups = []
    for batch in dict.fromkeys(row.batch for row in shown):
        bars = tuple(
            ChartBar(
                f"{row.engine}, {row.weights}",
                row.tokens_per_s,
                f"{row.tokens_per_s:.0f}",
                row.is_ours,
                spread=(row.tokens_per_s_min, row.tokens_per_s_max),
            )
            for row in shown
            if row.batch == batch
        )
        groups.append(Group(f"{batch} parallel request{'s' if batch > 1 else ''}", bars))
    return groups
