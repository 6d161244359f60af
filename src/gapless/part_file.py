"""The part file of a run: results on disk in the order in which they came, and how a run goes on from them.

Owns the format, the lock and the promise. A killed process loses no result that `append` returned for, at whatever
write it dies, because the file only grows. A power cut loses at most the results of one second, because `append` calls
fsync when the last one is a second old.

    {"part_of": "5d1c...", "run": {...}, "crc": "0badcafe"}        which run it belongs to
    {"index": 2, "id": "x", "text": " Paris", "crc": "8f00b204"}   a result; a later one replaces an error

The checksum of a result starts from the run's fingerprint, so a line proves that it is whole and of this run.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import select
import time
import zlib
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gapless.errors import ConfigError, OutputError
from gapless.file_lock import OpenRaw, open_locked
from gapless.run_identity import RunIdentity

Record = dict[str, Any]

SYNC_EVERY_S = 1.0
MOST_SHOWN = 3  # damaged lines in a message
HEADER_START = b'{"part_of": "'
CRC_LENGTH = len(', "crc": "00000000"}')

log = logging.getLogger(__name__)


def to_json(record: Record) -> bytes:
    """One line of JSON in UTF-8; text that UTF-8 cannot hold, such as a lone surrogate, is escaped."""
    try:
        return json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(record).encode()


def failed(record: Record) -> bool:
    """Whether the prompt of this record could not be completed."""
    return record.get("error") is not None


def write_all(file: io.FileIO, data: bytes) -> None:
    """Write every byte, through interruptions and to pipes that do not block."""
    view = memoryview(data)
    while view:
        written = file.write(view)
        if written is None:  # a full pipe that does not block
            select.select([], [file], [])
        view = view[written or 0 :]


def sync(descriptor: int) -> None:
    """fsync, where the file system has it."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def sync_folder(path: Path) -> None:
    """Make the folder's entries durable, where folders can be synced."""
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            sync(folder)
        finally:
            os.close(folder)


class _Damage(Exception):
    """Why a line does not count."""


class Contents:
    """The lines of a part file that count. A result costs nine bytes of memory, so that a run may have millions."""

    def __init__(self, num_lines: int) -> None:
        self.end = 0  # bytes; behind it is at most a torn line
        self.offsets = np.full(num_lines, -1, np.int64)  # [num_lines] where the line of each index begins; -1: nowhere
        self.failed = np.zeros(num_lines, np.bool_)  # [num_lines] its line holds an error
        self.damaged: list[str] = []  # "7: why", by line

    def put(self, index: int, offset: int, *, failed: bool) -> None:
        """The latest line of an index counts."""
        self.offsets[index] = offset
        self.failed[index] = failed


class Done(Set[int]):
    """Indexes that need not run again."""

    def __init__(self, contents: Contents, *, retry_errors: bool) -> None:
        self._contents = contents
        self._retry_errors = retry_errors

    def __contains__(self, index: object) -> bool:
        found = self._contents
        if not isinstance(index, int) or not 0 <= index < len(found.offsets) or found.offsets[index] < 0:
            return False
        return not (self._retry_errors and bool(found.failed[index]))

    def __iter__(self) -> Iterator[int]:
        return (int(index) for index in np.flatnonzero(self._contents.offsets >= 0) if int(index) in self)

    @classmethod
    def _from_iterable(cls, it: Iterable[int]) -> frozenset[int]:  # type: ignore[override]
        return frozenset(it)  # what `|` and `-` give

    def __len__(self) -> int:
        found = self._contents
        num_failed = np.count_nonzero(found.failed) if self._retry_errors else 0
        return int(np.count_nonzero(found.offsets >= 0) - num_failed)


class PartFile:
    """A part file, locked. Use `append` for each result, `sorted_records` for all; then `close` or `remove`."""

    def __init__(
        self,
        path: Path,
        belongs_to: RunIdentity,
        num_lines: int,
        *,
        restart: bool = False,
        skip_damaged: bool = False,
        retry_errors: bool = False,
        open_raw: OpenRaw = io.FileIO,
    ) -> None:
        self.path = path
        self._belongs_to = belongs_to
        self._seed = zlib.crc32(belongs_to.fingerprint.encode())
        self._began = False  # the first result repairs the end and writes the header
        self._synced_at = float("-inf")
        self._file = open_locked(path, open_raw)
        try:
            self._contents = Contents(num_lines) if restart else self._read(num_lines)
            if self._contents.damaged:
                self._judge_damage(skip_damaged)
        except BaseException:
            self.close()
            raise
        self.done = Done(self._contents, retry_errors=retry_errors)

    @property
    def num_failed(self) -> int:
        """Prompts whose result is an error, so far."""
        return int(np.count_nonzero(self._contents.failed))

    def append(self, record: Record) -> None:
        """Keep a result; it survives this process when this returns. Raises OutputError."""
        try:
            self._begin()
            begin = self._write(_seal(to_json(record), self._seed))
            self._contents.put(record["index"], begin, failed=failed(record))
            self._sync()
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from error

    def sorted_records(self, *, errors_only: bool = False) -> Iterator[bytes]:
        """All results in input order, as JSON without a line end; or the errors among them."""
        found = self._contents
        with self._reader() as file:
            for index in np.flatnonzero(found.failed if errors_only else found.offsets >= 0):
                file.seek(found.offsets[index])
                yield file.readline()[: -CRC_LENGTH - 1] + b"}"

    def remove(self) -> None:
        """Delete the file: its results are elsewhere."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self._file.close()

    def close(self) -> None:
        """Keep the file, unless it holds nothing. Can be called again."""
        if self._file.closed:
            return
        if os.fstat(self._file.fileno()).st_size == 0:
            self.remove()
        self._file.close()

    def _begin(self) -> None:
        if self._began:
            return
        self._file.truncate(self._contents.end)
        if self._contents.end == 0:
            header = {"part_of": self._belongs_to.fingerprint, "run": dict(self._belongs_to.values)}
            self._write(_seal(to_json(header), 0))
        self._began = True

    def _write(self, line: bytes) -> int:
        """Append a line and return where it begins; a failure leaves nothing of it."""
        begin = self._contents.end
        try:
            write_all(self._file, line)
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(begin)
            raise
        self._contents.end += len(line)
        return begin

    def _sync(self) -> None:
        now = time.monotonic()
        if now - self._synced_at < SYNC_EVERY_S:
            return
        sync(self._file.fileno())
        if self._synced_at < 0:
            sync_folder(self.path.parent)
        self._synced_at = now

    def _reader(self) -> BinaryIO:
        return open(self._file.fileno(), "rb", closefd=False)

    # -- what an earlier process left ----------------------------------------------------------------------------

    def _read(self, num_lines: int) -> Contents:
        found = Contents(num_lines)
        with self._reader() as file:
            file.seek(0)
            lines = enumerate(_whole_lines(file), start=1)
            for number, raw in lines:
                try:
                    if number > 1:
                        self._take(found, raw, num_lines)
                    elif (header := _read_header(raw)).get("part_of") != self._belongs_to.fingerprint:
                        self._refuse_results(header.get("run"), next(lines, None))
                        return Contents(num_lines)
                except _Damage as damage:
                    found.damaged.append(f"{number}: {damage}")
                found.end += len(raw)
            if found.end == 0:
                file.seek(0)
                self._check_cut_header(file.read(len(HEADER_START)))
        return found

    def _refuse_results(self, earlier: object, first: object) -> None:
        if first is not None:
            raise ConfigError(
                f"{self.path} holds results of a different run ({self._belongs_to.differences(earlier)}); "
                "move it away, or add --restart to overwrite it"
            )

    def _check_cut_header(self, start: bytes) -> None:
        """A file without a whole line holds no result. It is ours to overwrite if it begins as part files do."""
        if start.strip(b"\0") and not HEADER_START.startswith(start):
            raise ConfigError(f"{self.path} is not a part file; move it away, or add --restart to overwrite it")

    def _take(self, found: Contents, raw: bytes, num_lines: int) -> None:
        record = _unseal(raw, self._seed)
        index = record.get("index")
        if type(index) is not int or not 0 <= index < num_lines:
            raise _Damage(f"index {index!r} is not one of the {num_lines} prompts")
        if found.offsets[index] >= 0 and not found.failed[index]:
            raise _Damage(f"a second result for index {index}")
        found.put(index, found.end, failed=failed(record))

    def _judge_damage(self, skip_damaged: bool) -> None:
        damaged, found = self._contents.damaged, np.count_nonzero(self._contents.offsets >= 0)
        shown = "\n".join(f"{self.path}:{line}" for line in damaged[:MOST_SHOWN])
        if len(damaged) > MOST_SHOWN:
            shown += f"\nand {len(damaged) - MOST_SHOWN} more"
        if not found:
            raise ConfigError(f"{shown}\nno line holds a result of this run; move the file away, or add --restart")
        if not skip_damaged:
            raise ConfigError(
                f"{shown}\nadd --skip-damaged to run these prompts again and keep the other {found} results, "
                "or --restart to run all of them again"
            )
        log.warning("%s\nthese prompts run again; %d results are kept", shown, found)


def _read_header(raw: bytes) -> Record:
    try:
        return _unseal(raw, 0)
    except _Damage:
        raise _Damage("the header is damaged, or of a different version of Gapless") from None


def _seal(body: bytes, seed: int) -> bytes:
    return body[:-1] + _crc(body, seed)


def _unseal(raw: bytes, seed: int) -> Record:
    """The record of a line. Raises _Damage."""
    body = raw[: -CRC_LENGTH - 1] + b"}"
    if raw[-CRC_LENGTH - 1 :] != _crc(body, seed):
        raise _Damage("damaged, edited or of a different run: its checksum is wrong")
    record = json.loads(body)
    assert isinstance(record, dict)
    return record


def _crc(body: bytes, seed: int) -> bytes:
    return b', "crc": "%08x"}\n' % zlib.crc32(body, seed)


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines that end in a line feed; what a kill left behind them is not one."""
    return (raw for raw in file if raw.endswith(b"\n"))
