"""One JSON object a line, written by a thread of its own: a full disk or a reader that stalls never stops serving.

Owns the queue between those who log and the file. What cannot be written is counted and dropped.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Callable
from datetime import UTC, datetime

MAX_QUEUED = 10_000
CLOSE_S = 1.0
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """A record as a JSON object; what was given as `extra` becomes fields of it."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _PLAIN and name[0] != "_"}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class LineWriter(logging.Handler):
    """Formats where it is called, writes elsewhere."""

    def __init__(self, fd: int, on_loss: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.on_loss = on_loss
        self._fd = fd
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._write, name="gapless-log", daemon=True)
        self.setFormatter(JsonFormatter())
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record).encode() + b"\n")
        except queue.Full:
            self.on_loss()

    def close(self) -> None:
        """Write what is left, if it can be written soon."""
        try:
            self._lines.put_nowait(None)
            self._thread.join(CLOSE_S)
        except queue.Full:
            pass
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError:
                self.on_loss()


def set_up_logs(path: str | None, level: str) -> LineWriter:
    """Make all logging of this process go to the file, or to standard error. Raises OSError."""
    fd = 2 if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
    writer = LineWriter(fd)
    logging.root.handlers[:] = [writer]
    logging.root.setLevel(level)
    for name in ("gapless.server", "gapless.distributed"):
        logging.getLogger(name).setLevel(min(logging.INFO, logging.root.level))
    logging.raiseExceptions = False
    return writer
