"""A bar chart of the rows as an SVG file: a group for each batch size, a whisker over the rounds of each engine."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gapless.bench.table import Row

WIDTH, LABEL_WIDTH, VALUE_WIDTH, MARGIN = 860, 270, 70, 20
BAR_HEIGHT, BAR_GAP, GROUP_GAP, TITLE_HEIGHT = 18, 6, 34, 64
OURS, THEIRS, INK, FAINT = "#2a9d8f", "#b8bec6", "#1f2933", "#6b7280"
FONT = "font-family='system-ui, sans-serif'"


def bar_chart(rows: Sequence[Row], title: str, subtitle: str) -> str:
    """The chart's text. Rows that failed are left out."""
    shown = [row for row in rows if row.error is None]
    scale = (WIDTH - LABEL_WIDTH - VALUE_WIDTH - 2 * MARGIN) / max((row.tokens_per_s_max for row in shown), default=1.0)
    parts = [
        _text(MARGIN, 28, title, size=17, weight="bold"),
        _text(MARGIN, 48, subtitle, size=12, color=FAINT),
    ]
    y = TITLE_HEIGHT
    for batch in dict.fromkeys(row.batch for row in shown):
        group = [row for row in shown if row.batch == batch]
        parts.append(_text(MARGIN, y + 16, f"{batch} parallel request{'s' if batch > 1 else ''}", weight="bold"))
        y += GROUP_GAP - 8
        for row in group:
            parts += _bar(row, y, scale)
            y += BAR_HEIGHT + BAR_GAP
        y += GROUP_GAP - BAR_GAP - 14
    return _document(y, parts)


def _bar(row: Row, y: int, scale: float) -> list[str]:
    left, middle = MARGIN + LABEL_WIDTH, y + BAR_HEIGHT / 2
    width = row.tokens_per_s * scale
    low, high = left + row.tokens_per_s_min * scale, left + row.tokens_per_s_max * scale
    color = OURS if row.is_ours else THEIRS
    return [
        _text(
            left - 8, y + 13, f"{row.engine}, {row.weights}", anchor="end", weight="bold" if row.is_ours else "normal"
        ),
        f"<rect x='{left}' y='{y}' width='{width:.1f}' height='{BAR_HEIGHT}' fill='{color}'/>",
        f"<path d='M{low:.1f} {middle} H{high:.1f} M{low:.1f} {middle - 4} v8 M{high:.1f} {middle - 4} v8' "
        f"stroke='{INK}' fill='none'/>",
        _text(max(high, left + width) + 6, y + 13, f"{row.tokens_per_s:.0f}"),
    ]


def _text(
    x: float, y: float, text: str, *, size: int = 12, color: str = INK, weight: str = "normal", anchor: str = "start"
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{color}' font-weight='{weight}' "
        f"text-anchor='{anchor}' {FONT}>{escape(text)}</text>"
    )


def _document(height: int, parts: Sequence[str]) -> str:
    size = f"width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}'"
    body = "\n".join(parts)
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size}>\n<rect {size} fill='white'/>\n{body}\n</svg>\n"
