"""Where the results of `gapless run` go: a file that survives interruptions, or a stream.

Owns what a result says of a completion. A plain file is written in two stages: results go to `OUT.part` as they
complete, and a sorted copy takes the place of `OUT` in one move when all are there. Links are followed: the files lie
beside the target. Anything else that has a name, such as a FIFO or a device, is never replaced, only written to.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gapless.core.outcome import TokenLogprob
from gapless.errors import ConfigError, OutputError
from gapless.file_lock import OpenRaw
from gapless.part_file import PartFile, Record, sync, sync_folder, to_json, write_all
from gapless.prompt_file import Line

if TYPE_CHECKING:  # it would load torch
    from gapless.client import Completion

STDOUT, STDERR = 1, 2
COPY_BYTES = 1 << 20


class Results(Protocol):
    """Takes results as they complete, in any order."""

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
        belongs_to: str,
        num_lines: int,
        *,
        restart: bool = False,
        skip_damaged: bool = False,
        open_raw: OpenRaw = io.FileIO,
    ) -> None:
        self.path = path
        self._sorted = path.with_name(path.name + ".part.sorted")
        self._open_raw = open_raw
        _check_place(path, self._sorted)
        self.part = PartFile(
            path.with_name(path.name + ".part"),
            belongs_to,
            num_lines,
            restart=restart,
            skip_damaged=skip_damaged,
            open_raw=open_raw,
        )

    @property
    def done(self) -> Set[int]:
        """Indexes whose results an earlier process left."""
        return self.part.done

    def add(self, record: Record) -> None:
        self.part.append(record)

    def finish(self) -> None:
        try:
            self._write_sorted()
            os.replace(self._sorted, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._sorted.unlink()
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from error
        self.part.remove()

    def close(self) -> None:
        self.part.close()

    def _write_sorted(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._sorted.unlink()
        with io.BufferedWriter(self._open_raw(self._sorted, "x"), COPY_BYTES) as file:
            self.part.copy_sorted(file)
            file.flush()
            sync(file.fileno())


class ResultStream:
    """Results written as they complete to what is not a plain file; nothing to go on from."""

    def __init__(self, name: str, file: io.FileIO) -> None:
        self.name, self._file = name, file
        self.done: Set[int] = frozenset()

    def add(self, record: Record) -> None:
        try:
            write_all(self._file, to_json(record) + b"\n")
        except BrokenPipeError:
            raise OutputError(f"{self.name}: nobody reads it any more") from None
        except OSError as error:
            raise OutputError(f"{self.name}: cannot be written: {error.strerror}") from error

    def finish(self) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()


def open_results(
    name: str, belongs_to: str, num_lines: int, *, restart: bool, skip_damaged: bool
) -> ResultFile | ResultStream:
    """The place that `-o` names; `-` is standard output. Raises ConfigError where nothing can be written."""
    status = os.fstat(STDOUT) if name == "-" else _status(name)
    for descriptor in (STDOUT, STDERR):
        if status is not None and os.path.samestat(status, os.fstat(descriptor)):
            return ResultStream("standard output" if name == "-" else name, io.FileIO(os.dup(descriptor), "w"))
    if status is None or stat.S_ISREG(status.st_mode):
        path = Path(os.path.realpath(name))
        return ResultFile(path, belongs_to, num_lines, restart=restart, skip_damaged=skip_damaged)
    if stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{name}: cannot be written: is a folder")
    try:
        return ResultStream(name, io.FileIO(name, "w"))
    except OSError as error:
        raise ConfigError(f"{name}: cannot be written: {error.strerror}") from None


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


# -- what a result says ------------------------------------------------------------------------------------------


def result_record(line: Line, completion: Completion, *, token_ids: bool) -> Record:
    """The result of a prompt that ran. If one of its choices failed, it failed.

    A single choice stands in the record itself, several as a list; `num_tokens` counts the tokens of all of them.
    """
    if completion.failure is not None:
        return error_record(line.index, line.id, completion.failure)
    choices = [_choice_record(choice, token_ids=token_ids) for choice in completion.choices]
    record: Record = {"index": line.index, "id": line.id}
    record |= choices[0] if len(choices) == 1 else {"choices": choices}
    record["num_prompt_tokens"] = len(completion.prompt_token_ids)
    record["num_tokens"] = sum(len(choice.token_ids) for choice in completion.choices)
    if completion.prompt_logprobs is not None:
        record["prompt_logprobs"] = [_logprob_record(item) for item in completion.prompt_logprobs]
    return record


def _choice_record(choice: Completion, *, token_ids: bool) -> Record:
    record: Record = {"text": choice.text}
    if token_ids:
        record["token_ids"] = list(choice.token_ids)
    record["finish_reason"] = choice.finish_reason
    if choice.logprobs is not None:
        record["logprobs"] = [_logprob_record(item) for item in choice.logprobs]
    return record


def _logprob_record(item: TokenLogprob | None) -> Record | None:
    if item is None:
        return None
    return {"token": item.token, "logprob": item.logprob, "rank": item.rank, "top": item.top}


def error_record(index: int, name: str | int, error: str) -> Record:
    """The result of a prompt that could not run."""
    return {"index": index, "id": name, "error": error}
