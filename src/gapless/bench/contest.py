"""The parent's side of the benchmark: engines in processes of their own, loaded one by one, then run round by round.

In each round every engine has its turn, so that drift of the machine affects all alike. Only one engine runs at a time.
An engine that fails leaves the contest, and the others continue. No process outlives the contest in any case.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

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


class Child:
    """An engine's process. Close it, or use it in a `with` block."""

    def __init__(self, python: str, threads: int, log: Path) -> None:
        self._log = log
        self._closed = False
        with log.open("wb") as log_file:
            self._process = subprocess.Popen(
                [python, "-m", "gapless.bench.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                env=_environment(python, threads),
                start_new_session=True,  # a group of its own: the terminal's Ctrl-C is ours alone, and we end them all
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert self._process.stdout is not None
        threading.Thread(target=_pump, args=(self._process.stdout, self._lines), daemon=True).start()

    def ask(self, line: str, timeout_s: float = ANSWER_TIMEOUT_S) -> WorkerAnswer:
        """Send a line and wait for its answer. An error of any kind is an answer too."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError:
            return self._obituary()
        try:
            answer = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return EngineFailure(f"no answer within {timeout_s:.0f} s")
        return decode_answer(answer) if answer else self._obituary()

    def close(self) -> None:
        """Kill the process and its children. Can be called again."""
        if not self._closed:
            self._closed = True
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _obituary(self) -> EngineFailure:
        code = self._process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return EngineFailure(f"{how}: {lines[-1].strip()[:200]}" if lines else how)


def _pump(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


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
        self._take(self.child.ask(encode(self.task)))
        self.load_s = time.perf_counter() - began

    def run(self, counts: bool) -> None:
        if self.error is None:
            time.sleep(SETTLE_S)
            self._take(self.child.ask("run\n"), counts)

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
