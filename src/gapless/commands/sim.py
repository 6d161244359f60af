"""`gapless sim`: plays a request trace through the real scheduler on a clock of its own, for one replica or many."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from gapless.errors import ConfigError, OutputError
from gapless.progress import progress_bar

if TYPE_CHECKING:
    from gapless.sim.figures import Latency, SimFigures
    from gapless.sim.fleet import FleetOptions, FleetRun
    from gapless.sim.step_file import SimEngine

LIMITS = ("num_rows", "num_blocks", "block_size", "max_batch_tokens", "max_model_len")
ROUTINGS = ("prefix", "load", "random")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `gapless sim`."""
    add = parser.add_argument
    add("trace", metavar="TRACE", help="requests: Azure's CSV, Mooncake's JSONL, or a recorded JSONL")
    add(
        "--costs",
        default="h200-8b",
        metavar="STEPS.jsonl",
        help="measured steps, from `gapless bench steps`, or shipped ones: h200-8b, h200-0.6b (default: h200-8b)",
    )
    add("--replicas", type=int, default=1, metavar="N", help="engines (default: 1)")
    add("--ranks", type=int, default=1, metavar="N", help="GPUs of a replica, for the price (default: 1)")
    add("--routing", choices=ROUTINGS, default="prefix", help="how requests are spread (default: prefix)")
    add("--rate", type=float, default=1.0, metavar="X", help="let requests arrive X times as fast (default: 1)")
    add("--copies", type=int, default=1, metavar="N", help="N copies of the trace at once, of different prompts")
    add("--requests", type=int, metavar="N", help="only the first N requests, of all copies together")
    add("--depth", type=int, metavar="N", help="steps in flight (default: as measured)")
    add("--max-step-time", type=float, default=0.2, metavar="S", help="as for serve (default: 0.2; 0 is no limit)")
    for name in LIMITS:
        add("--" + name.replace("_", "-"), type=int, metavar="N", help=f"{name} of each replica (default: as measured)")
    add("--no-prefix-cache", action="store_true", help="simulate without the prefix cache")
    add("--price", type=float, default=0.0, metavar="P", help="price of a GPU for an hour")
    add("--seed", type=int, default=0, metavar="N", help="of random routing (default: 0)")
    add("--html", metavar="FILE", help="draw latencies, load over time and replicas into this page")
    add("--json", metavar="FILE", help="write the figures to this file as JSON")


def sim(args: argparse.Namespace) -> int:
    """Fit, simulate, print."""
    _check(args)
    from gapless.sim.arrivals import copied, read_arrivals, scaled
    from gapless.sim.figures import figures_of
    from gapless.sim.fleet import simulate
    from gapless.sim.step_file import read_engine

    engine = read_engine(args.costs)
    options = _options(args, engine)
    arrivals = scaled(copied(read_arrivals(args.trace), args.copies)[: args.requests], args.rate)
    with progress_bar("simulating", len(arrivals), "request") as bar:
        run = simulate(arrivals, options, bar.advance)
    figures = figures_of(run, args.ranks, args.price)
    lines = table(figures, run, engine.name, args.ranks, args.price)
    print("\n".join(lines))
    if args.html is not None:
        from gapless.sim.page import render

        _write(args.html, render(run, lines, f"Gapless simulation: {Path(args.trace).name}"))
    if args.json is not None:
        _write(args.json, json.dumps(dataclasses.asdict(figures), indent=1) + "\n")
    return 0


def _check(args: argparse.Namespace) -> None:
    for name in ("replicas", "ranks", "copies", "requests", "depth", *LIMITS):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if not 0 < args.rate < math.inf:
        raise ConfigError(f"--rate must be a number above 0, not {args.rate}")
    for name in ("max_step_time", "price"):
        if not 0 <= getattr(args, name) < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be a number of at least 0, not {getattr(args, name)}")


def _options(args: argparse.Namespace, engine: SimEngine) -> FleetOptions:
    from gapless.sim.fleet import FleetOptions

    given = {name: getattr(args, name) for name in LIMITS if getattr(args, name) is not None}
    if args.block_size is not None and args.num_blocks is None:  # the same memory
        given["num_blocks"] = max(engine.limits.num_blocks * engine.limits.block_size // args.block_size, 1)
    given |= {"prefix_cache": False} if args.no_prefix_cache else {}
    limits = dataclasses.replace(engine.limits, **given)
    depth, max_step_s = args.depth or engine.depth, args.max_step_time or math.inf
    return FleetOptions(limits, engine.costs, args.replicas, depth, max_step_s, args.routing, args.seed)


def table(figures: SimFigures, run: FleetRun, name: str, ranks: int, price: float) -> list[str]:
    """The lines that the command prints."""
    options, costs = run.options, run.options.costs
    limits = options.limits
    lines = [
        f"costs       {name}: {costs.num_steps} steps, error {costs.error:.1%} (median), {costs.error_p90:.0%} (p90)",
        f"fleet       {_many(options.replicas, 'replica')} of {_many(ranks, 'GPU')}, routing {options.routing}, depth "
        f"{options.depth}; each {limits.num_rows} rows, {limits.num_blocks} blocks of {limits.block_size}",
        f"requests    {figures.num_requests} in {figures.seconds:.1f} s, {figures.num_preemptions} preemptions",
        f"throughput  {figures.output_tokens_per_s:.1f} output tokens/s, "
        f"{figures.input_tokens_per_s:.1f} prompt tokens/s",
        _latency("first token", figures.ttft),
        _latency("per token", figures.tpot),
        _latency("end to end", figures.whole),
        f"cache hits  {figures.cached_share:.1%} of prompt tokens",
        f"devices     busy {figures.busy_share:.1%}; {figures.used_share:.1%} of the capacity used, by the most used "
        f"{figures.most_used_share:.1%}; {figures.rows_per_step:.1f} decode rows a step; "
        f"KV memory used {figures.kv_share:.0%} at most",
    ]
    if options.replicas > 1:
        lines.append(
            f"router      {figures.route_us:.0f} us a request on this machine, "
            f"{figures.router_share:.1%} of one processor at this rate"
        )
    if price:
        lines.append(f"cost        {figures.cost:.2f}, {figures.cost_per_million:.3f} for a million output tokens")
    if figures.num_refused:
        lines.append(f"refused     {_many(figures.num_refused, 'request')}, the first: {run.refusal}")
    lines.append(f"bottleneck  {figures.bottleneck}")
    num_steps = sum(totals.num_steps for totals in run.totals)
    lines.append(f"simulated   {num_steps} steps in {run.took_s:.1f} s")
    return lines


def _latency(name: str, latency: Latency) -> str:
    values = (f"{q} {1000 * getattr(latency, q):.1f} ms" for q in ("p50", "p90", "p99"))
    return f"{name:<12}{', '.join(values)}"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from None
