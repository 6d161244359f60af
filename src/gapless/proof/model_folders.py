"""Damaged model folders: every outcome is a result or an error from `errors`, in bounded time and memory.

A seed and a number identify a case. It writes a tiny model, damages it, loads it, and generates a few tokens. Cases run
in worker processes with little address space, so that a crash or a hang is a finding and not the end of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from gapless.core.params import SamplingParams
from gapless.errors import EngineClosed, GaplessError, InvalidRequest
from gapless.llm import LLM
from gapless.proof.damage import damage
from gapless.proof.tiny_files import KINDS, write_model

FAILED = "failed"
CASES_A_WORKER = 100
CASE_SECONDS = 30.0  # a case takes a few hundredths
SPACE_BYTES = 8 * 2**30  # of addresses, the libraries' own included
MOST_FAILURES = 20
_MESSAGES = [{"role": "user", "content": "hi"}]

Say = Callable[[str], None]
Play = Callable[[int, int], str]


def fuzz_model_folders(
    seconds: float,
    seed: int,
    *,
    most_cases: int | None = None,
    say: Say = print,
    play: Play | None = None,
) -> Counter[str]:
    """Play cases until time or number is up. Counts outcomes by name; `FAILED` are those that must not be."""
    counts: Counter[str] = Counter()
    until = time.monotonic() + seconds
    first = 0
    while time.monotonic() < until and first != most_cases and counts[FAILED] < MOST_FAILURES:
        most = min(CASES_A_WORKER, (most_cases or first + CASES_A_WORKER) - first)
        first += _play_batch(seed, first, most, until, counts, say, play or play_case)
    return counts


def _play_batch(seed: int, first: int, most: int, until: float, counts: Counter[str], say: Say, play: Play) -> int:
    """Play cases in one worker until one of them ends it; returns how many were played."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    worker = context.Process(target=_work, args=(theirs, seed, first, most, play), daemon=True)
    worker.start()
    theirs.close()
    number = first
    try:
        while number < first + most and (number == first or time.monotonic() < until):
            found = _next_outcome(ours, worker)
            outcome, trouble = (FAILED, found) if isinstance(found, str) else found
            counts[outcome] += 1
            if trouble:
                say(f"case {seed}/{number}: {trouble}\npython -m {__name__} --seed {seed} --case {number}")
            number += 1
            if isinstance(found, str):
                break
    finally:
        ours.close()  # ends the worker when it next reports
        worker.join(CASE_SECONDS)
        worker.kill()
    return number - first


def _next_outcome(ours: Connection, worker: multiprocessing.process.BaseProcess) -> tuple[str, str] | str:
    """An outcome, and the error in it; or why the worker has ended."""
    try:
        if ours.poll(CASE_SECONDS):
            outcome, trouble = ours.recv()
            return outcome, trouble
        worker.kill()
        worker.join()
        return f"no outcome within {CASE_SECONDS:.0f} s"
    except EOFError:
        worker.join()
        return f"the process ended with exit code {worker.exitcode}"


def _work(theirs: Connection, seed: int, first: int, most: int, play: Play) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (SPACE_BYTES, SPACE_BYTES))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries report there what the outcome says
    logging.disable()
    torch.set_num_threads(1)
    with contextlib.suppress(BrokenPipeError):
        for number in range(first, first + most):
            theirs.send(_outcome(seed, number, play))


def _outcome(seed: int, number: int, play: Play) -> tuple[str, str]:
    try:
        return play(seed, number), ""
    except BaseException:  # a library that panics raises something that is not an Exception
        return FAILED, traceback.format_exc()


def play_case(seed: int, number: int, say: Say = lambda text: None) -> str:
    """Write, damage, load and run one model; return the name of the outcome. Raises any unexpected error."""
    dice = random.Random(f"{seed}/{number}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, dice.choice(KINDS), dice)
        say(damage(dice, folder))
        return _try(folder, native=dice.random() < 0.5, say=say)


def _try(folder: Path, *, native: bool, say: Say) -> str:
    try:
        with LLM(folder, device="cpu", native=native, max_num_rows=2, max_batch_tokens=32, kv_memory="1MiB") as llm:
            return _ask(llm)
    except EngineClosed:
        raise
    except GaplessError as error:
        say(f"{type(error).__name__}: {error}")
        return type(error).__name__


def _ask(llm: LLM) -> str:
    """Generate from tokens, a text and a chat; a damaged tokenizer or template may refuse the last two."""
    params = SamplingParams(max_tokens=3)
    outcomes = [completion.error for completion in llm.generate([[1, 2, 3], [4]], params)]
    for ask in (lambda: llm.generate("Hello", params)[0], lambda: llm.chat(_MESSAGES, params)):
        with contextlib.suppress(InvalidRequest):
            outcomes.append(ask().error)
    if any(outcomes):
        if "died" in str(outcomes):
            raise EngineClosed(str(outcomes))
        return "step failed"
    return "ran"


def main(argv: list[str] | None = None) -> int:
    """Replay one case in this process."""
    parser = argparse.ArgumentParser(prog=f"python -m {__name__}", description="Play one damaged model again.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--case", type=int, required=True)
    args = parser.parse_args(argv)
    print(play_case(args.seed, args.case, say=print))
    return 0


if __name__ == "__main__":
    sys.exit(main())
