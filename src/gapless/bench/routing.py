"""`gapless bench routing`: a trace through the real router and simulated replicas, once for each policy.

Shows what routing by prefix is worth: prompt tokens found in caches, and the time to the first token.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gapless.errors import ConfigError, OutputError
from gapless.progress import progress_bar

if TYPE_CHECKING:
    from gapless.sim.arrivals import Arrival
    from gapless.sim.fleet import FleetOptions

HEADER = f"{'policy':<9}{'replicas':>9}{'rate':>7}{'hits':>8}{'first token p50':>17}{'p90':>10}{'p99':>10}{'used':>7}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `gapless bench routing`."""
    add = parser.add_argument
    add("trace", metavar="TRACE", help="requests, as for `gapless sim`; hits need hashes, as Mooncake's trace has")
    add("--costs", default="h200-8b", metavar="STEPS.jsonl", help="as for `gapless sim` (default: h200-8b)")
    add("--replicas", type=int, nargs="+", default=[4, 16], metavar="N", help="engines (default: 4 16)")
    add(
        "--rate", type=float, nargs="+", metavar="X", help="for each number of replicas, how many times as fast (all 1)"
    )
    add("--requests", type=int, metavar="N", help="only the first N of the trace")
    add("--seed", type=int, default=0, metavar="N", help="of random routing (default: 0)")
    add("--json", metavar="FILE", help="write the rows to this file as JSON")


@dataclasses.dataclass(frozen=True, slots=True)
class RoutingRow:
    """One policy on one fleet. Times in seconds."""

    policy: str
    replicas: int
    rate: float
    cached_share: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    used_share: float

    def line(self) -> str:
        times = ((self.ttft_p50, 14), (self.ttft_p90, 7), (self.ttft_p99, 7))
        shown = "".join(f"{1000 * value:>{width}.0f} ms" for value, width in times)
        head = f"{self.policy:<9}{self.replicas:>9}{self.rate:>7g}{self.cached_share:>8.1%}"
        return f"{head}{shown}{self.used_share:>7.0%}"


def main(args: argparse.Namespace) -> int:
    """Simulate each policy, and print a line each."""
    from gapless.sim.arrivals import read_arrivals, scaled
    from gapless.sim.fleet import FleetOptions
    from gapless.sim.step_file import read_engine

    rates = args.rate or [1.0] * len(args.replicas)
    _check(args, rates)
    engine = read_engine(args.costs)
    arrivals = read_arrivals(args.trace)[: args.requests]
    print(f"{len(arrivals)} requests of {Path(args.trace).name}; {engine.name}\n{HEADER}")
    rows: list[RoutingRow] = []
    for replicas, rate in zip(args.replicas, rates, strict=True):
        fleet = FleetOptions(engine.limits, engine.costs, replicas, engine.depth, seed=args.seed)
        for row in compare_policies(scaled(arrivals, rate), fleet, rate):
            print(row.line(), flush=True)
            rows.append(row)
    if args.json is not None:
        try:
            Path(args.json).write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
        except OSError as error:
            raise OutputError(f"{args.json}: cannot be written: {error.strerror}") from None
    return 0


def _check(args: argparse.Namespace, rates: Sequence[float]) -> None:
    if args.requests is not None and args.requests < 1:
        raise ConfigError(f"--requests must be at least 1, not {args.requests}")
    if any(number < 1 for number in args.replicas):
        raise ConfigError(f"--replicas must be at least 1, not {min(args.replicas)}")
    if not all(0 < rate < math.inf for rate in rates):
        raise ConfigError(f"--rate must be numbers above 0, not {rates}")
    if len(rates) != len(args.replicas):
        raise ConfigError(f"--rate needs a number for each of --replicas: {len(args.replicas)}, not {len(rates)}")


def compare_policies(arrivals: Sequence[Arrival], fleet: FleetOptions, rate: float) -> list[RoutingRow]:
    """The same requests under each policy."""
    from gapless.distributed.router import POLICIES
    from gapless.sim.figures import figures_of
    from gapless.sim.fleet import simulate

    rows = []
    for policy in POLICIES:
        with progress_bar(policy, len(arrivals), "request") as bar:
            run = simulate(arrivals, dataclasses.replace(fleet, routing=policy), bar.advance)
        found = figures_of(run, 1, 0.0)
        times = (found.ttft.p50, found.ttft.p90, found.ttft.p99)
        rows.append(RoutingRow(policy, fleet.replicas, rate, found.cached_share, *times, found.used_share))
    return rows
