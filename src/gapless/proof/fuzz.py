"""Random cases against every check, for a given time: `python -m gapless.proof.fuzz --seconds 600`.

The target `schedules` plays workloads with everything at once on tiny models of several families: prefix cache,
preemption, aborts, stop strings and tokens, seeded draws, minimum lengths, steps that fail, block and chunk sizes,
depths 1 to 4. A seed determines a workload. A failing one is shrunk and written to a file, which `gapless check
--replay` plays. The other targets have modules of their own.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from gapless.proof import report
from gapless.proof.campaign import examine, smallest
from gapless.proof.draw import Menu, draw_asks, draw_schedule
from gapless.proof.judge import ALONE, Judge
from gapless.proof.model_folders import FAILED, fuzz_model_folders
from gapless.proof.part_files import Wrong, fuzz_part_files
from gapless.proof.report import ProofFailure, Tally
from gapless.proof.schedule import Schedule
from gapless.proof.stage import ModelStage
from gapless.proof.tiny import FAMILIES, TINY, named_stage, tiny_config
from gapless.runner.native_model import why_not

MENU = Menu(block_sizes=(1, 2, 3, 4, 5, 8, 16), most_requests=10, most_tokens=14, last_arrival=20, failing_share=0.2)
NUM_MODELS = 2  # of each family
DEPTHS = (1, 2, 3, 4)
DEPTHS_A_WORKLOAD = 3
MOST_FAILURES = 5
SAY_EVERY_S = 30.0


@cache
def _stage(model: str) -> ModelStage:
    return named_stage(model)


@cache
def _kinds(family: str) -> tuple[str, str]:
    """Every second model runs native steps, if they are available and can run the family."""
    return "", "/native" if why_not(torch.float32, tiny_config(family)) is None else ""


def workload(seed: int, number: int) -> tuple[str, Schedule, tuple[int, ...]]:
    """A model, a schedule and the depths to play it at: all from the two numbers, and whether steps can be native."""
    dice = random.Random(f"{seed}/{number}")
    family = dice.choice(list(FAMILIES))
    model = f"{TINY}{family}/{dice.randrange(NUM_MODELS)}{dice.choice(_kinds(family))}"
    stage = _stage(model)
    asks = draw_asks(dice, stage.config.vocab_size, 8, MENU.most_tokens, text_stops=True)
    schedule = draw_schedule(dice, asks, stage.room, MENU)
    return model, schedule, tuple(dice.sample(DEPTHS, DEPTHS_A_WORKLOAD))


def run(
    seed: int, *, most_s: float | None = None, most_workloads: int | None = None, say: Callable[[str], None] = print
) -> tuple[Tally, int, list[ProofFailure]]:
    """Play workloads until time or number is up, or a few have failed."""
    tally, failures, number = Tally(), list[ProofFailure](), 0
    began = said = time.monotonic()
    while len(failures) < MOST_FAILURES and number != most_workloads:
        now = time.monotonic()
        if most_s is not None and now - began > most_s:
            break
        if now - said > SAY_EVERY_S:
            said = now
            say(f"{now - began:5.0f} s  {number} workloads, {tally.num_compared} tokens, {len(failures)} failures")
        try:
            failure = _try(seed, number, tally)
        except KeyboardInterrupt:
            say("interrupted")
            break
        if failure is not None:
            failures.append(failure)
            say(f"workload {seed}/{number}: {failure.trouble.kind}: {failure.trouble.message}")
        number += 1
    return tally, number, failures


def _try(seed: int, number: int, tally: Tally) -> ProofFailure | None:
    model, schedule, depths = workload(seed, number)
    stage = _stage(model)
    judge = Judge(stage, MENU.most_tokens)
    found = examine(judge, [schedule], depths, tally)
    if found is None:
        return None
    small = smallest(judge, found, stage.room)
    return ProofFailure(model, {}, stage.room, MENU.most_tokens, *small)


def fuzz_schedules(seconds: float, seed: int, save: Path) -> Counter[str]:
    """Play workloads, and save those that fail."""
    torch.set_num_threads(1)
    tally, number, failures = run(seed, most_s=seconds, say=_say)
    _say(
        f"{'workloads':11} {number} on {NUM_MODELS * len(FAMILIES)} tiny models; "
        f"{tally.num_stopped} requests stopped early, {tally.num_failed} failed with their step"
    )
    _say("\n".join(report.lines(tally, ALONE)))
    for index, failure in enumerate(failures):
        path = save / f"fuzz-{seed}-{index}.json"
        failure.save(path)
        _say(f"{'smallest':11} {failure.schedule.describe()}")
        _say(f"{'replay':11} gapless check --replay {path}")
    return Counter({"workloads": number, FAILED: max(len(failures), int(not tally.passed))})


def _part_files(seconds: float, seed: int) -> Counter[str]:
    try:
        return fuzz_part_files(seconds, seed)
    except Wrong as error:
        _say(f"FAIL: {error}")
        return Counter({FAILED: 1})


def _say(text: str) -> None:
    print(text, flush=True)


# seconds, a seed and a folder for what fails -> counts of outcomes; what is under FAILED should not be
TARGETS: dict[str, Callable[[float, int, Path], Counter[str]]] = {
    "schedules": fuzz_schedules,
    "model-folders": lambda seconds, seed, save: fuzz_model_folders(seconds, seed, say=_say),
    "part-files": lambda seconds, seed, save: _part_files(seconds, seed),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gapless.proof.fuzz", description=__doc__)
    parser.add_argument("--target", choices=[*TARGETS, "all"], default="all", help="target to fuzz (default: all)")
    parser.add_argument("--seconds", type=float, default=600.0, help="time for all targets together (default: 600)")
    parser.add_argument("--seed", type=int, default=None, help="seed of the cases (default: from the clock)")
    parser.add_argument("--save", default=".", metavar="DIR", help="folder for failing schedules")
    args = parser.parse_args(argv)
    if not Path(args.save).is_dir():
        parser.error(f"--save: {args.save}: no such folder")
    seed = args.seed if args.seed is not None else int(time.time())
    _say(f"{'seed':11} {seed}")
    names = list(TARGETS) if args.target == "all" else [args.target]
    num_failed = 0
    for name in names:
        counts = TARGETS[name](args.seconds / len(names), seed, Path(args.save))
        num_failed += counts[FAILED]
        _say(f"{name}: {', '.join(f'{count} {outcome}' for outcome, count in counts.most_common())}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
