"""`gapless bench steps`: runs a real engine through steps of many shapes and writes how long each took.

`gapless sim` fits its costs to this file. Owns the arguments; `step_meter` measures.
"""

from __future__ import annotations

import argparse
import dataclasses

from gapless.config import EngineOptions
from gapless.errors import ConfigError

DEFAULT_DEPTH = 2  # where the options leave it open: the simulated engine does not change its depth


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `gapless bench steps`."""
    add = parser.add_argument
    add("-o", "--output", default="steps.jsonl", metavar="FILE", help="default: steps.jsonl")
    add("--rounds", type=int, default=3, metavar="N", help="times that all shapes run (default: 3)")
    add("--longest", type=int, metavar="N", help="longest context to measure (default: an eighth of the model's)")


def main(args: argparse.Namespace, options: EngineOptions) -> int:
    """Measure, write, and say how well a fit describes the steps."""
    from gapless.bench.step_meter import measure_steps
    from gapless.llm import LLM
    from gapless.sim.costs import fit
    from gapless.sim.step_file import write_steps

    for name in ("rounds", "longest"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, not {value}")
    depth = options.depth if isinstance(options.depth, int) else DEFAULT_DEPTH
    options = dataclasses.replace(options, depth=depth)
    with LLM(**dataclasses.asdict(options)) as llm:
        found = measure_steps(llm, args.rounds, args.longest)
    write_steps(args.output, found)
    costs = fit(found.steps)
    print(
        f"{args.output}: {costs.num_steps} steps; "
        f"a fit is off by {costs.error:.1%} (median), {costs.error_p90:.0%} (p90)"
    )
    return 0
