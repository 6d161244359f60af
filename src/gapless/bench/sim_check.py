"""`gapless bench sim`: plays a trace on a real engine and in the simulator, and prints both side by side.

    calibrate | load 1 | load 2 | calibrate | load 1 | load 2 | calibrate          two rounds

Costs are fitted to steps that ran between the plays of the trace, never to the trace's own, so the comparison is a
prediction. Both are spread over the same minutes because the speed of a machine drifts. What other programs take from
this one is measured too: no prediction knows it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gapless.config import EngineOptions
from gapless.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from gapless.bench.step_meter import StepMeter
    from gapless.llm import LLM
    from gapless.sim.arrivals import Arrival
    from gapless.sim.costs import Costs
    from gapless.sim.fleet import FleetOptions
    from gapless.sim.replica import Served

DEFAULT_DEPTH = 2
FIRST_SEED = 10_000  # of prompts that are played; those of calibrations are below
QUIET = 0.1  # of the time: above it the machine is too busy for a comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `gapless bench sim`."""
    add = parser.add_argument
    add("trace", metavar="TRACE", help="requests, as for `gapless sim`")
    add("--requests", type=int, default=64, metavar="N", help="the first N of the trace (default: 64)")
    add("--shrink", type=int, default=16, metavar="N", help="divide all lengths by N (default: 16)")
    add("--most-output", type=int, default=32, metavar="N", help="clip answers to N tokens (default: 32)")
    add("--load", type=float, nargs="+", default=[0.3, 0.8], metavar="X", help="shares of the capacity (0.3 0.8)")
    add("--rounds", type=int, default=5, metavar="N", help="times that each load is played (default: 5)")
    add("--json", metavar="FILE", help="write the rows to this file as JSON")


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """One load: each figure as measured, over all rounds and in each, and as predicted. Times in seconds."""

    load: float
    fit_error: float
    disturbed: float | None  # share of the time in which the engine waited for a processor
    measured: dict[str, float]
    rounds: list[dict[str, float]]
    predicted: dict[str, float]

    def ratio(self, name: str) -> float:
        return self.predicted[name] / max(self.measured[name], 1e-12)

    def lines(self) -> list[str]:
        """A table. The range says how far single rounds lie apart."""
        busy = "" if self.disturbed is None else f"; other programs took {self.disturbed:.0%} of the engine's time"
        found = [f"load {self.load:g} of the capacity; the fit's error is {self.fit_error:.1%}{busy}"]
        for name, measured in self.measured.items():
            ratios = [self.predicted[name] / max(each[name], 1e-12) for each in self.rounds]
            found.append(
                f"  {name:<18}{measured:>10.4g} measured{self.predicted[name]:>11.4g} predicted"
                f"{self.ratio(name):>8.3f}  ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        return found


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
        print("\n".join(row.lines()))
    if any((row.disturbed or 0.0) > QUIET for row in rows):
        print("The machine is busy: the comparison says little. Stop other programs, or run this with priority.")
    if args.json is not None:
        try:
            Path(args.json).write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
        except OSError as error:
            raise OutputError(f"{args.json}: cannot be written: {error.strerror}") from None
    return 0


@dataclasses.dataclass(slots=True)
class Plays:
    """All plays of one load."""

    load: float
    due: list[Arrival]
    rounds: list[list[Served]] = dataclasses.field(default_factory=list)
    waited_s: float = 0.0  # for a processor
    seconds: float = 0.0


def compare_loads(llm: LLM, arrivals: Sequence[Arrival], loads: Sequence[float], rounds: int) -> list[Compared]:
    """Calibrate, play each load, calibrate, and so on; then simulate."""
    from gapless.bench.step_meter import StepMeter, calibrate, warm_up
    from gapless.sim.costs import fit
    from gapless.sim.fleet import FleetOptions

    engine = llm.engine
    longest = max(arrival.num_prompt for arrival in arrivals)
    warm_up(llm)
    meter = StepMeter.of(engine)
    calibrate(engine, 1, longest)
    max_step_s = engine.options.max_step_time or math.inf
    fleet = FleetOptions(engine.resolved.limits, fit(meter.steps), 1, int(engine.options.depth), max_step_s)
    plays = [Plays(load, _timed(arrivals, fleet, load)) for load in loads]
    for number in range(rounds):
        for index, each in enumerate(plays):
            _play(llm, meter, each, 1 + number * len(plays) + index)
        calibrate(engine, 1, longest, number + 1)
    costs = fit(meter.steps)
    return [_compared(each, costs, fleet) for each in plays]


def _timed(arrivals: Sequence[Arrival], fleet: FleetOptions, load: float) -> list[Arrival]:
    """The requests at a rate that takes this share of the capacity."""
    from gapless.sim.arrivals import scaled
    from gapless.sim.fleet import simulate

    at_once = simulate([dataclasses.replace(arrival, at_s=0.0) for arrival in arrivals], fleet)
    span_s = max(arrivals[-1].at_s, 1e-9)
    return scaled(arrivals, span_s * load / at_once.end_s)


def _play(llm: LLM, meter: StepMeter, plays: Plays, number: int) -> None:
    """Once more in real time. Each number has its own prompts: no earlier play has left them in the cache."""
    from gapless.bench.machine import processor_wait_s
    from gapless.bench.replay import replay
    from gapless.garbage import heap_frozen
    from gapless.sim.arrivals import renamed

    num_steps, waited_s, began = len(meter.steps), processor_wait_s(), time.perf_counter()
    meter.start_over()
    with heap_frozen():
        plays.rounds.append(replay(llm.engine, renamed(plays.due, number), FIRST_SEED + number))
    plays.seconds += time.perf_counter() - began
    now_s = processor_wait_s()
    plays.waited_s += math.nan if waited_s is None or now_s is None else now_s - waited_s
    del meter.steps[num_steps:]  # the trace's own steps must not help


def _compared(plays: Plays, costs: Costs, fleet: FleetOptions) -> Compared:
    from gapless.sim.fleet import simulate

    run = simulate(plays.due, dataclasses.replace(fleet, costs=costs))
    single = [summary(served) for served in plays.rounds]
    disturbed = None if math.isnan(plays.waited_s) else plays.waited_s / max(plays.seconds, 1e-9)
    predicted = summary(run.served)
    measured = {name: sum(each[name] for each in single) / len(single) for name in predicted}
    return Compared(plays.load, costs.error, disturbed, measured, single, predicted)


def summary(served: Sequence[Served]) -> dict[str, float]:
    """The figures that are compared."""
    from gapless.sim.figures import Latency, tpots, ttfts, wholes

    seconds = max(each.end_s for each in served)
    found = {"tokens/s": sum(each.arrival.num_output for each in served) / seconds}
    for name, values in (("first token", ttfts), ("per token", tpots), ("end to end", wholes)):
        times = values(served)
        latency = Latency.of(times)
        found[f"{name} mean"] = sum(times) / max(len(times), 1)
        found |= {f"{name} p50": latency.p50, f"{name} p99": latency.p99}
    return found
