"""The latency of a serving run as an SVG file: for each kind, the share of requests within a time."""

from __future__ import annotations

from collections.abc import Sequence

from gapless.bench.chart import FAINT, INK, OURS, document, text
from gapless.bench.openai_client import Sample

LEFT, WIDTH, TOP, HEIGHT, STEP = 60, 780, 80, 150, 220
MARKS = (0.5, 0.9, 0.99)


def draw(samples: Sequence[Sample], subtitle: str) -> str:
    """The chart's text. Failed requests are left out."""
    done = [sample for sample in samples if sample.error is None]
    kinds = {
        "time to first token": [sample.ttft_s for sample in done],
        "time per output token": [tpot for sample in done if (tpot := sample.tpot_s) is not None],
        "end to end": [sample.whole_s for sample in done],
    }
    parts = [text(20, 28, "How long clients waited", size=17, weight="bold"), text(20, 48, subtitle, color=FAINT)]
    for row, (name, values) in enumerate(kinds.items()):
        parts += _panel(name, sorted(1000 * value for value in values), TOP + row * STEP)
    return document(TOP + len(kinds) * STEP, parts)


def _panel(name: str, ordered: Sequence[float], y: int) -> list[str]:
    parts = [text(LEFT, y - 6, f"{name}, ms", weight="bold")]
    if not ordered:
        return [*parts, text(LEFT, y + 20, "no answer", color=FAINT)]
    most = ordered[-1] or 1.0
    bottom = y + HEIGHT
    for mark in MARKS:
        line = bottom - mark * HEIGHT
        value = ordered[min(len(ordered) - 1, int(mark * len(ordered)))]
        parts += [
            f"<path d='M{LEFT} {line:.1f} H{LEFT + WIDTH}' stroke='#e5e7eb'/>",
            text(LEFT - 8, line + 4, f"{mark:.0%}", anchor="end", color=FAINT),
            f"<circle cx='{LEFT + WIDTH * value / most:.1f}' cy='{line:.1f}' r='3' fill='{OURS}'/>",
            text(LEFT + WIDTH * value / most - 6, line - 5, f"{value:.0f}", anchor="end"),
        ]
    steps = "".join(
        f" H{LEFT + WIDTH * value / most:.1f} V{bottom - HEIGHT * (i + 1) / len(ordered):.1f}"
        for i, value in enumerate(ordered)
    )
    return [
        *parts,
        f"<path d='M{LEFT} {bottom}{steps}' stroke='{OURS}' fill='none' stroke-width='1.5'/>",
        f"<path d='M{LEFT} {y} V{bottom} H{LEFT + WIDTH}' stroke='{INK}' fill='none'/>",
        text(LEFT, bottom + 16, "0", color=FAINT),
        text(LEFT + WIDTH, bottom + 16, f"{most:.0f}", anchor="end", color=FAINT),
    ]
