"""Bar charts as SVG files: groups of bars, ours in colour, with a whisker or a mark where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LABEL_WIDTH, VALUE_WIDTH, MARGIN = 860, 270, 70, 20
BAR_HEIGHT, BAR_GAP, GROUP_GAP, TITLE_HEIGHT = 18, 6, 34, 64
OURS, THEIRS, INK, FAINT, LIMIT = "#2a9d8f", "#b8bec6", "#1f2933", "#6b7280", "#d1495b"
FONT = "font-family='system-ui, sans-serif'"


@dataclass(frozen=True, slots=True)
class ChartBar:
    """One value."""

    label: str
    value: float
    text: str
    is_ours: bool
    spread: tuple[float, float] | None = None  # drawn as a whisker
    limit: float | None = None  # drawn as a mark that the bar cannot get past


@dataclass(frozen=True, slots=True)
class Group:
    """Bars to compare."""

    title: str
    bars: tuple[ChartBar, ...]
    scale: float = 1.0  # of this group's values


def bar_chart(groups: Sequence[Group], title: str, subtitle: str) -> str:
    """The chart's text."""
    longest = max((_reach(bar) * group.scale for group in groups for bar in group.bars), default=1.0)
    unit = (WIDTH - LABEL_WIDTH - VALUE_WIDTH - 2 * MARGIN) / longest
    parts = [
        text(MARGIN, 28, title, size=17, weight="bold"),
        text(MARGIN, 48, subtitle, size=12, color=FAINT),
    ]
    y = TITLE_HEIGHT
    for group in groups:
        parts.append(text(MARGIN, y + 16, group.title, weight="bold"))
        y += GROUP_GAP - 8
        for bar in group.bars:
            parts += _bar(bar, y, unit * group.scale)
            y += BAR_HEIGHT + BAR_GAP
        y += GROUP_GAP - BAR_GAP - 14
    return document(y, parts)


def _reach(bar: ChartBar) -> float:
    return max(bar.value, bar.spread[1] if bar.spread else 0.0)


def _bar(bar: ChartBar, y: int, unit: float) -> list[str]:
    left, middle = MARGIN + LABEL_WIDTH, y + BAR_HEIGHT / 2
    color, weight = (OURS, "bold") if bar.is_ours else (THEIRS, "normal")
    parts = [
        text(left - 8, y + 13, bar.label, anchor="end", weight=weight),
        f"<rect x='{left}' y='{y}' width='{bar.value * unit:.1f}' height='{BAR_HEIGHT}' fill='{color}'/>",
        text(left + _reach(bar) * unit + 6, y + 13, bar.text),
    ]
    if bar.spread is not None:
        low, high = (left + value * unit for value in bar.spread)
        path = f"M{low:.1f} {middle} H{high:.1f} M{low:.1f} {middle - 4} v8 M{high:.1f} {middle - 4} v8"
        parts.append(f"<path d='{path}' stroke='{INK}' fill='none'/>")
    if bar.limit is not None:
        x = left + bar.limit * unit
        parts.append(f"<path d='M{x:.1f} {y - 2} v{BAR_HEIGHT + 4}' stroke='{LIMIT}' stroke-width='2' fill='none'/>")
    return parts


def text(
    x: float, y: float, text: str, *, size: int = 12, color: str = INK, weight: str = "normal", anchor: str = "start"
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{color}' font-weight='{weight}' "
        f"text-anchor='{anchor}' {FONT}>{escape(text)}</text>"
    )


def document(height: int, parts: Sequence[str]) -> str:
    size = f"width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}'"
    body = "\n".join(parts)
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size}>\n<rect {size} fill='white'/>\n{body}\n</svg>\n"
