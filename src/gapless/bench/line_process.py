"""A process of a benchmark that answers lines with lines. It never outlives its user, and never makes them wait.

Knows pipes, signals and time limits. Does not know what the lines mean.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

LAST_WORDS = 200  # most characters of its last line


class ProcessFailed(Exception):
    """The process died, or took too long and was killed. The text says which."""


class LineProcess:
    """A process in a group of its own, so that the terminal's Ctrl-C is ours alone, and we end them all.

    Its answers begin with `mark`. Other lines on its standard output are skipped. Close it, or use a `with` block.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, mark: str = "") -> None:
        self._log, self._mark = log, mark
        self._closed = self._is_late = False
        with log.open("wb") as log_file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                errors="replace",
                env=dict(environment),
                start_new_session=True,
            )

    def ask(self, line: str, timeout_s: float) -> str:
        """Send a line and wait for its answer, without the mark. Raises ProcessFailed."""
        alarm = threading.Timer(timeout_s, self._stop)
        alarm.daemon = True
        alarm.start()
        try:
            answer = self._exchange(line)
        finally:
            alarm.cancel()
        if answer is None:
            raise ProcessFailed(f"no answer within {timeout_s:.0f} s" if self._is_late else self._obituary())
        return answer

    def close(self) -> None:
        """Kill the process and its children. Can be called again."""
        if not self._closed:
            self._closed = True
            self._kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(self, line: str) -> str | None:
        """The answer; None when the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):  # the pipe may break at any moment
            self._process.stdin.write(line)
            self._process.stdin.flush()
            for answer in self._process.stdout:
                if answer.startswith(self._mark) and answer.endswith("\n"):
                    return answer.removeprefix(self._mark)
        return None

    def _stop(self) -> None:
        self._is_late = True
        self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _obituary(self) -> str:
        code = self._process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1].strip()[:LAST_WORDS]}" if lines else how
