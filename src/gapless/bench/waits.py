"""From samples of a serving run to figures: latency, and how many requests met both limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gapless.bench.openai_client import Sample

PERCENTILES = (50, 90, 99)
MOST_ERRORS = 5  # different ones that are shown


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of the load. Times in milliseconds."""

    num_requests: int
    num_errors: int
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    goodput_per_s: float  # requests a second within both limits
    good_share: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    gap_ms: dict[str, float]  # between two pieces of a stream
    whole_ms: dict[str, float]
    errors: dict[str, int]


def summarize(
    samples: Sequence[Sample], slo_ttft_ms: float, slo_tpot_ms: float, began_s: float | None = None
) -> Summary:
    """All numbers of a run that began at a time, or when its first request was due."""
    done = [sample for sample in samples if sample.error is None]
    if began_s is None:
        began_s = min((sample.due_s for sample in samples), default=0.0)
    seconds = max(max((sample.end_s for sample in samples), default=0.0) - began_s, 1e-9)
    good = [s for s in done if 1000 * s.ttft_s <= slo_ttft_ms and 1000 * (s.tpot_s or 0.0) <= slo_tpot_ms]
    gaps = [b - a for s in done for a, b in zip(s.chunk_s, s.chunk_s[1:], strict=False)]
    errors: dict[str, int] = {}
    for sample in samples:
        if sample.error is not None:
            errors[sample.error] = errors.get(sample.error, 0) + 1
    return Summary(
        num_requests=len(samples),
        num_errors=len(samples) - len(done),
        seconds=seconds,
        requests_per_s=len(done) / seconds,
        output_tokens_per_s=sum(s.num_output_tokens for s in done) / seconds,
        prompt_tokens=sum(s.num_prompt_tokens for s in done),
        output_tokens=sum(s.num_output_tokens for s in done),
        goodput_per_s=len(good) / seconds,
        good_share=len(good) / max(len(samples), 1),
        ttft_ms=spread([s.ttft_s for s in done]),
        tpot_ms=spread([tpot for s in done if (tpot := s.tpot_s) is not None]),
        gap_ms=spread(gaps),
        whole_ms=spread([s.whole_s for s in done]),
        errors=errors,
    )


def split(samples: Sequence[Sample], num_first: int, slo_ttft_ms: float, slo_tpot_ms: float) -> dict[str, Summary]:
    """The first answers to end, and those after them, whose time begins when the last of the first has ended."""
    ordered = sorted(samples, key=lambda sample: sample.end_s)
    first, later = ordered[:num_first], ordered[num_first:]
    found = {"first": summarize(first, slo_ttft_ms, slo_tpot_ms)}
    return found | ({"later": summarize(later, slo_ttft_ms, slo_tpot_ms, first[-1].end_s)} if later else {})


def format_part(name: str, part: Summary) -> str:
    """One line of a part of the load."""
    ttft = ", ".join(f"{key} {part.ttft_ms.get(key, 0.0):.0f}" for key in ("p50", "p99"))
    return f"{name} {part.num_requests}: {part.requests_per_s:.2f} requests/s; ms to the first token: {ttft}"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and maximum, in milliseconds."""
    if not values:
        return {}
    ordered = sorted(1000 * value for value in values)
    found = {"mean": sum(ordered) / len(ordered)}
    found |= {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in PERCENTILES}
    return found | {"max": ordered[-1]}


def format_summary(summary: Summary, slo: str) -> str:
    """The table for people."""
    lines = [
        f"{summary.num_requests} requests in {summary.seconds:.1f} s, {summary.num_errors} errors, "
        f"{summary.requests_per_s:.2f} requests/s, {summary.output_tokens_per_s:.0f} output tokens/s",
        f"goodput {summary.goodput_per_s:.2f} requests/s: {summary.good_share:.0%} within {slo}",
        f"longest gap in a stream: {summary.gap_ms.get('max', 0.0):.0f} ms",
        "",
        f"{'ms':<26}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99", "max")),
    ]
    named = {
        "time to first token": summary.ttft_ms,
        "time per output token": summary.tpot_ms,
        "between pieces": summary.gap_ms,
        "end to end": summary.whole_ms,
    }
    lines += [f"{name:<26}" + "".join(f"{value:>10.1f}" for value in found.values()) for name, found in named.items()]
    often = sorted(summary.errors.items(), key=lambda item: -item[1])
    lines += [f"error, {count} times: {text}" for text, count in often[:MOST_ERRORS]]
    if len(often) > MOST_ERRORS:
        lines.append(f"and {len(often) - MOST_ERRORS} other errors; --json has all of them")
    return "\n".join(lines)
