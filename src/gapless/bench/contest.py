"""The parent's side of the benchmark: engines in processes of their own, loaded one by one, then run round by round.

In each round every engine has its turn, so that drift of the machine affects all alike. Only one engine runs at a time.
An engine that fails leaves the contest, and the others continue. No process outlives the contest in any case.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import gapless
from gapless.bench.job import (
    Contender,
    ContestTask,
    EngineFailure,
    EngineLoaded,
    Round,
    WorkerAnswer,
    decode_answer,
    encode,
)
from gapless.bench.line_process import LineProcess, ProcessFailed

ANSWER_TIMEOUT_S = 900.0
SETTLE_S = 0.25  # between turns: idle OpenMP threads of the previous engine still spin for up to 0.2 s


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one contender at one batch size."""

    contender: Contender
    batch: int
    weights: str
    version: str = ""
    load_s: float = 0.0  # from the start of the process until it was ready
    rounds: tuple[Round, ...] = ()
    error: str | None = None


class Child(LineProcess):
    """An engine's process."""

    def __init__(self, python: str, threads: int, log: Path) -> None:
        super().__init__([python, "-m", "gapless.bench.worker"], _environment(python, threads), log)

    def answer(self, line: str, timeout_s: float = ANSWER_TIMEOUT_S) -> WorkerAnswer:
        """Send a line and wait for its answer. An error of any kind is an answer too."""
        try:
            return decode_answer(self.ask(line, timeout_s))
        except ProcessFailed as error:
            return EngineFailure(str(error))


def _environment(python: str, threads: int) -> dict[str, str]:
    values = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if python != sys.executable:  # an environment that has the peer, and not us
        values["PYTHONPATH"] = str(Path(gapless.__file__).parents[1])
    return values


def is_installed(module: str, python: str) -> bool:
    """Whether this interpreter can find a module. Raises OSError when there is no such interpreter."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    return subprocess.run([python, "-P", "-c", code, module], capture_output=True).returncode == 0


@dataclass(slots=True)
class _Entry:
    """A contender on its way to a result."""

    task: ContestTask
    child: Child
    ready: EngineLoaded | None = None
    load_s: float = 0.0
    rounds: tuple[Round, ...] = ()
    error: str | None = None

    def load(self, began: float) -> None:
        self._take(self.child.answer(encode(self.task)))
        self.load_s = time.perf_counter() - began

    def run(self, counts: bool) -> None:
        if self.error is None:
            time.sleep(SETTLE_S)
            self._take(self.child.answer("run\n"), counts)

    def result(self) -> Result:
        version, weights = (self.ready.version, self.ready.weights) if self.ready else ("", self.task.weights)
        return Result(self.task.contender, self.task.batch, weights, version, self.load_s, self.rounds, self.error)

    def _take(self, answer: WorkerAnswer, counts: bool = True) -> None:
        match answer:
            case EngineLoaded():
                self.ready = answer
            case Round():
                self.rounds += (answer,) if counts else ()
            case EngineFailure(error):
                self.error = error
                self.child.close()


@dataclass(frozen=True, slots=True)
class TaskStart:
    """A task, and the interpreter that can do it."""

    task: ContestTask
    python: str


def run_contest(
    starts: Sequence[TaskStart], num_rounds: int, num_warmup: int, folder: Path, advance: Callable[[int], None]
) -> list[Result]:
    """Load every engine, run the rounds, end every process. `advance(n)` is called after n further turns."""
    with ExitStack() as stack:
        entries = []
        for number, start in enumerate(starts):
            began = time.perf_counter()
            log = folder / f"{start.task.batch}-{number}-{start.task.contender.name}.log"
            child = stack.enter_context(Child(start.python, start.task.job.threads, log))
            entries.append(_Entry(start.task, child))
            entries[-1].load(began)
            advance(1)
        for number in range(num_warmup + num_rounds):
            for entry in entries:
                entry.run(counts=number >= num_warmup)
                advance(1)
        return [entry.result() for entry in entries]
