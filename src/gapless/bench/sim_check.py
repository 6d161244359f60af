"""`gapless bench sim`: plays a trace on a real engine and in the simulator, and prints both side by side.

Costs are fitted to steps that ran before and after the trace, never to the trace's own steps, so the comparison is a
prediction. Half of the calibration comes after it because the speed of a shared machine drifts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapless.config import EngineOptions
from gapless.errors import ConfigError

if TYPE_CHECKING:
    from gapless.llm import LLM
    from gapless.sim.arrivals import Arrival
    from gapless.sim.replica import Served

DEFAULT_DEPTH = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `gapless bench sim`."""
    add = parser.add_argument
    add("trace", metavar="TRACE", help="requests, as for `gapless sim`")
    add("--requests", type=int, default=64, metavar="N", help="the first N of the trace (default: 64)")
    add("--shrink", type=int, default=16, metavar="N", help="divide all lengths by N (default: 16)")
    add("--most-output", type=int, default=32, metavar="N", help="clip answers to N tokens (default: 32)")
    add("--load", type=float, nargs="+", default=[0.3, 0.8], metavar="X", help="shares of the capacity (0.3 0.8)")
    add("--rounds", type=int, default=1, metavar="N", help="calibrations before and after each load (default: 1)")
    add("--json", metavar="FILE", help="write the rows to this file as JSON")


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """One load: each figure as measured and as predicted. Times in seconds."""

    load: float
    fit_error: float
    measured: dict[str, float]
    predicted: dict[str, float]

    def ratio(self, name: str) -> float:
        return self.predicted[name] / max(self.measured[name], 1e-12)


def main(args: argparse.Namespace, options: EngineOptions) -> int:
    """Play each load, and print predicted against measured."""
    from gapless.llm import LLM
    from gapless.sim.arrivals import read_arrivals, shrunk

    for name in ("requests", "shrink", "most_output", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if not all(0 < load < math.inf for load in args.load):
        raise ConfigError(f"--load must be numbers above 0, not {args.load}")
    arrivals = shrunk(read_arrivals(args.trace)[: args.requests], args.shrink, args.most_output)
    depth = options.depth if isinstance(options.depth, int) else DEFAULT_DEPTH
    with LLM(**dataclasses.asdict(dataclasses.replace(options, depth=depth))) as llm:
        rows = compare_loads(llm, arrivals, args.load, args.rounds)
    for row in rows:
        print(f"load {row.load:g} of the capacity; the fit's error is {row.fit_error:.1%}")
        for name, measured in row.measured.items():
            print(
                f"  {name:<18}{measured:>10.4g} measured {row.predicted[name]:>10.4g} predicted {row.ratio(name):>7.3f}"
            )
    if args.json is not None:
        Path(args.json).write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    return 0


def compare_loads(llm: LLM, arrivals: Sequence[Arrival], loads: Sequence[float], rounds: int) -> list[Compared]:
    """Calibrate, play, calibrate, simulate; for each load."""
    from gapless.bench.replay import replay
    from gapless.bench.step_meter import StepMeter, calibrate, warm_up
    from gapless.sim.arrivals import scaled
    from gapless.sim.costs import fit
    from gapless.sim.fleet import FleetOptions, simulate

    engine = llm.engine
    options = engine.options
    longest = max(arrival.num_prompt for arrival in arrivals)
    warm_up(llm)
    rows = []
    meter = StepMeter.of(engine)
    for number, load in enumerate(loads):
        meter.steps.clear()
        calibrate(engine, rounds, longest, 2 * number)
        fleet = FleetOptions(
            engine.resolved.limits, fit(meter.steps), 1, int(options.depth), options.max_step_time or math.inf
        )
        at_once = simulate([dataclasses.replace(arrival, at_s=0.0) for arrival in arrivals], fleet)
        wanted_s = at_once.end_s / load  # the same requests in this time
        span_s = max(arrivals[-1].at_s, 1e-9)
        due = scaled(arrivals, span_s / wanted_s)
        num_steps = len(meter.steps)
        served = replay(engine, due, 500 + number)
        del meter.steps[num_steps:]  # the trace's own steps must not help
        calibrate(engine, rounds, longest, 2 * number + 1)
        costs = fit(meter.steps)
        run = simulate(due, dataclasses.replace(fleet, costs=costs))
        rows.append(Compared(load, costs.error, summary(served), summary(run.served)))
    return rows


def summary(served: Sequence[Served]) -> dict[str, float]:
    """The figures that are compared."""
    from gapless.sim.figures import Latency, tpots, ttfts, wholes

    seconds = max(each.end_s for each in served)
    found: dict[str, Any] = {"tokens/s": sum(each.arrival.num_output for each in served) / seconds}
    for name, values in (("first token", ttfts), ("per token", tpots), ("end to end", wholes)):
        times = values(served)
        latency = Latency.of(times)
        found |= {
            f"{name} mean": sum(times) / max(len(times), 1),
            f"{name} p50": latency.p50,
            f"{name} p99": latency.p99,
        }
    return found
