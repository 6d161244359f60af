"""The child's side of the benchmark: `python -m gapless.bench.worker` is one engine in a process of its own.

Reads a task from standard input, loads, says EngineLoaded, and then answers each further line with a round. Output of
libraries goes to standard error, which the parent keeps in a file. Standard output carries only answers.
"""

from __future__ import annotations

import os
import resource
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TextIO

from gapless.bench.job import (
    ContestTask,
    EngineFailure,
    EngineLoaded,
    LoadedEngine,
    Output,
    Round,
    WorkerAnswer,
    decode_task,
    encode,
)
from gapless.bench.peers import LOADERS


def main() -> int:
    """Serve until standard input ends."""
    answers = _keep_stdout()
    try:
        task = decode_task(sys.stdin.readline())
        engine = LOADERS[task.contender.name](task)
        _send(answers, EngineLoaded(_version(task.contender.package), engine.weights))
        for _ in sys.stdin:
            _send(answers, run_round(engine, task))
    except Exception as error:
        traceback.print_exc()
        _send(answers, EngineFailure(last_line(error)))
        return 1
    return 0


def run_round(engine: LoadedEngine, task: ContestTask) -> Round:
    """Generate once. Raises RuntimeError unless each prompt got all its tokens."""
    began = time.perf_counter()
    output = engine.run()
    seconds = time.perf_counter() - began
    _check(output, task)
    return Round(seconds, _peak_memory(), output.tokens, output.overlap)


def last_line(error: BaseException) -> str:
    """The last line of a traceback."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return lines[-1].strip()


def _check(output: Output, task: ContestTask) -> None:
    if len(output.num_tokens) != len(task.job.prompts):
        raise RuntimeError(f"{len(output.num_tokens)} results for {len(task.job.prompts)} prompts")
    for index, count in enumerate(output.num_tokens):
        if count != task.job.max_tokens:
            raise RuntimeError(f"prompt {index}: {count} tokens came out instead of {task.job.max_tokens}")


def _keep_stdout() -> TextIO:
    """Standard output for us alone; file descriptor 1 becomes a second standard error."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(kept, "w", buffering=1)


def _send(answers: TextIO, answer: WorkerAnswer) -> None:
    answers.write(encode(answer))
    answers.flush()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _peak_memory() -> int:
    """Most bytes held. Not getrusage's on Linux: that one starts from the parent's, kept through exec."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    sys.exit(main())
