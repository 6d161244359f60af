"""Where the results of `gapless run` go: a file that survives interruptions, or a stream.

A plain file is written in two stages: results go to `OUT.part` as they complete, and a sorted copy takes the place of
`OUT` in one move when all are there. Links are followed: the files lie beside the target. Anything else that has a
name, such as a FIFO or a device, is never replaced, only written to. Errors stand among the results, and once more in a
file of their own. As long as there are any, the part file stays, so that they can run again.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Protocol

from gapless.errors import ConfigError, OutputError
from gapless.file_lock import OpenRaw
from gapless.formats.base import OutputForm
from gapless.formats.jsonl import JsonLines
from gapless.part_file import PartFile, Record, failed, sync, sync_folder, to_json, write_all
from gapless.run_identity import RunIdentity

STDOUT, STDERR = 1, 2
COPY_BYTES = 1 << 20
PLAIN = OutputForm(JsonLines(), {})


class Results(Protocol):
    """Takes results as they complete, in any order."""

    @property
    def done(self) -> Set[int]:
        """Indexes that need not run again."""

    @property
    def num_failed(self) -> int:
        """Prompts whose result is an error, so far."""

    def add(self, record: Record) -> None:
        """Keep a result. Raises OutputError."""

    def finish(self) -> None:
        """All results are there. Raises OutputError."""

    def close(self) -> None:
        """Let go, and keep what is there. Can be called again."""


class ResultFile:
    """Results on their way to a plain file. The part file is removed only when its sorted copy is in place."""

    def __init__(
        self,
        path: Path,
        belongs_to: RunIdentity,
        num_lines: int,
        *,
        form: OutputForm = PLAIN,
        restart: bool = False,
        skip_damaged: bool = False,
        retry_errors: bool = False,
        open_raw: OpenRaw = io.FileIO,
    ) -> None:
        self.path = path
        self.errors_path = errors_beside(path)
        self._form = form
        self._sorted = path.with_name(path.name + ".part.sorted")
        self._open_raw = open_raw
        _check_place(path, self._sorted)
        self.part = PartFile(
            path.with_name(path.name + ".part"),
            belongs_to,
            num_lines,
            restart=restart,
            skip_damaged=skip_damaged,
            retry_errors=retry_errors,
            open_raw=open_raw,
        )

    @property
    def done(self) -> Set[int]:
        return self.part.done

    @property
    def num_failed(self) -> int:
        return self.part.num_failed

    def add(self, record: Record) -> None:
        self.part.append(record)

    def finish(self) -> None:
        """A kill in between leaves the part file, from which the same run does all of this again."""
        try:
            self._replace(self.path, self._form, self.part.sorted_records())
            if self.part.num_failed:
                errors = OutputForm(JsonLines(), {}, self._form.has_index)
                self._replace(self.errors_path, errors, self.part.sorted_records(errors_only=True))
            else:
                with contextlib.suppress(FileNotFoundError):
                    self.errors_path.unlink()
            sync_folder(self.path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._sorted.unlink()
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from error
        if self.part.num_failed:
            self.part.close()
        else:
            self.part.remove()

    def close(self) -> None:
        self.part.close()

    def _replace(self, path: Path, form: OutputForm, records: Iterator[bytes]) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._sorted.unlink()
        with io.BufferedWriter(self._open_raw(self._sorted, "x"), COPY_BYTES) as file:
            form.write(records, file)
            file.flush()
            sync(file.fileno())
        os.replace(self._sorted, path)


class ResultStream:
    """Results written as they complete to what is not a plain file; nothing to go on from."""

    def __init__(self, name: str, file: io.FileIO, form: OutputForm = PLAIN) -> None:
        self.name, self._file, self._form = name, file, form
        self.done: Set[int] = frozenset()
        self.num_failed = 0

    def add(self, record: Record) -> None:
        try:
            write_all(self._file, self._form.told(to_json(record)) + b"\n")
        except BrokenPipeError:
            raise OutputError(f"{self.name}: nobody reads it any more") from None
        except OSError as error:
            raise OutputError(f"{self.name}: cannot be written: {error.strerror}") from error
        self.num_failed += failed(record)

    def finish(self) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()


def open_results(
    name: str,
    belongs_to: RunIdentity,
    num_lines: int,
    *,
    form: OutputForm = PLAIN,
    restart: bool = False,
    skip_damaged: bool = False,
    retry_errors: bool = False,
) -> ResultFile | ResultStream:
    """The place that `-o` names; `-` is standard output. Raises ConfigError where nothing can be written."""
    status = os.fstat(STDOUT) if name == "-" else _status(name)
    for descriptor in (STDOUT, STDERR):
        if status is not None and os.path.samestat(status, os.fstat(descriptor)):
            return ResultStream("standard output" if name == "-" else name, io.FileIO(os.dup(descriptor), "w"), form)
    if status is None or stat.S_ISREG(status.st_mode):
        path = Path(os.path.realpath(name))
        return ResultFile(
            path,
            belongs_to,
            num_lines,
            form=form,
            restart=restart,
            skip_damaged=skip_damaged,
            retry_errors=retry_errors,
        )
    if stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{name}: cannot be written: is a folder")
    try:
        return ResultStream(name, io.FileIO(name, "w"), form)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be written: {error.strerror}") from None


def errors_beside(path: Path) -> Path:
    """The file of errors that belongs to a result file."""
    return path.with_name(path.stem + ".errors.jsonl")


def _status(name: str) -> os.stat_result | None:
    try:
        return os.stat(name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be written: {error.strerror}") from None


def _check_place(path: Path, other: Path) -> None:
    """Before the work, not after it: the folder takes new files, and the names are free. Raises ConfigError."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{path}: cannot be written: {'is a folder' if path.is_dir() else 'no such folder'}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{path}: cannot be written: the folder is read-only")
    status = _status(str(other))
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{other}: is not a plain file; move it away")
