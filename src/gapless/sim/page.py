"""A simulated run as one HTML file: the table, latencies as curves, load over time, and how even the replicas were."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from gapless.bench.chart import FAINT, INK, OURS, document, text
from gapless.sim.figures import tpots, ttfts
from gapless.sim.fleet import FleetRun

LEFT, WIDTH, TOP, HEIGHT, STEP = 70, 760, 40, 130, 200
NUM_POINTS = 200  # of a curve
STYLE = "body { font-family: system-ui, sans-serif; margin: 2em; color: #1f2933 } pre { line-height: 1.4 }"

Curve = list[tuple[float, float]]  # x and y, both from 0 to 1


def render(run: FleetRun, lines: Sequence[str], title: str) -> str:
    """The page's text. lines: the table as the command prints it."""
    body = f"<h1>{escape(title)}</h1>\n<pre>{escape(chr(10).join(lines))}</pre>\n{draw(run)}"
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html>\n<html lang='en'><head>{head}</head>\n<body>\n{body}</body></html>\n"


def draw(run: FleetRun) -> str:
    """Four panels as SVG."""
    busy = sorted((totals.busy_s / max(run.end_s, 1e-9) for totals in run.totals), reverse=True)
    first, each = ([1000 * value for value in values] for values in (ttfts(run.served), tpots(run.served)))
    rate = _rate(run)
    panels = [
        ("time to first token: share of requests within a time, ms", *_shares(first), "100%"),
        ("time per output token: share of requests within a time, ms", *_shares(each), "100%"),
        ("output tokens/s, by the end of their requests, over the seconds of the trace", *rate),
        ("busy share of each replica, the busiest first", *_steps(busy), "100%"),
    ]
    parts: list[str] = []
    for number, (name, curve, right, top) in enumerate(panels):
        parts += _panel(name, curve, right, top, TOP + number * STEP)
    return document(TOP + len(panels) * STEP, parts)


def _shares(values: Sequence[float]) -> tuple[Curve, str]:
    """The share of values below each; the axis ends at p99, so that one straggler does not flatten the rest."""
    if len(values) == 0:
        return [], ""
    ranks = np.linspace(0, 1, NUM_POINTS)
    quantiles = np.quantile(values, ranks)
    most = max(float(np.quantile(values, 0.99)), 1e-9)
    curve = [
        (value / most, rank) for value, rank in zip(quantiles.tolist(), ranks.tolist(), strict=True) if value <= most
    ]
    return curve, f"{most:.0f} (p99)"


def _rate(run: FleetRun) -> tuple[Curve, str, str]:
    span = max(run.end_s, 1e-9)
    ends = [each.end_s for each in run.served]
    counts = [float(each.arrival.num_output) for each in run.served]
    sums, _ = np.histogram(ends, NUM_POINTS // 2, (0.0, span), weights=counts)
    rates = sums / (span / len(sums))
    most = max(float(rates.max()), 1e-9)
    return _steps((rates / most).tolist())[0], f"{span:.0f}", f"{most:.0f}"


def _steps(values: Sequence[float]) -> tuple[Curve, str]:
    width = 1 / max(len(values), 1)
    curve = [(x * width, value) for n, value in enumerate(values) for x in (n, n + 1)]
    return curve, str(len(values))


def _panel(name: str, curve: Curve, right: str, top: str, y: int) -> list[str]:
    bottom = y + HEIGHT
    points = " ".join(f"{LEFT + WIDTH * px:.1f},{bottom - HEIGHT * min(py, 1.0):.1f}" for px, py in curve)
    return [
        text(LEFT, y - 8, name, weight="bold"),
        f"<polyline points='{points}' stroke='{OURS}' fill='none' stroke-width='1.5'/>",
        f"<path d='M{LEFT} {y} V{bottom} H{LEFT + WIDTH}' stroke='{INK}' fill='none'/>",
        text(LEFT - 8, y + 8, top, anchor="end", color=FAINT),
        text(LEFT, bottom + 16, "0", color=FAINT),
        text(LEFT + WIDTH, bottom + 16, right, anchor="end", color=FAINT),
    ]
