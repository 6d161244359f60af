"""Files of prompts: which ones names and patterns mean, how many rows they have, and their digest.

Owns how prompts are found and read. Files are read twice: once to count and hash them, before a model is loaded, and
once row by row as the engine takes them. So nothing but the row at hand is in memory.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

from gapless.errors import InvalidRequest
from gapless.formats.base import BadLine, Container, Dialect, Line, Row, Unreadable
from gapless.formats.find import find_container
from gapless.formats.jsonl import JsonLines
from gapless.formats.plain import PlainRows
from gapless.formats.seen_ids import SeenIds

COPY_BYTES = 1 << 20
STDIN = "-"


@dataclass(frozen=True, slots=True)
class PromptFile:
    """One file, examined: it can be read to its end."""

    name: str  # for messages
    open: Callable[[], contextlib.AbstractContextManager[BinaryIO]]
    container: Container
    num_rows: int
    digest: str  # of the bytes, wherever they came from
    changed_at: int  # nanoseconds

    def rows(self) -> Generator[Row, None, None]:
        """Raises InvalidRequest, also when the file is not the one that was examined."""
        with _readable(self.name), self.open() as file:
            if _changed_at(file) != self.changed_at:
                raise InvalidRequest(f"{self.name}: has changed since the run began; start it again")
            yield from self.container.rows(file)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Files in a row."""

    files: Sequence[PromptFile]

    @property
    def num_lines(self) -> int:
        return sum(file.num_rows for file in self.files)

    @property
    def digest(self) -> str:
        digests = [file.digest for file in self.files]
        return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()

    def rows(self) -> Generator[Row, None, None]:
        """With several files, places name their file."""
        for file in self.files:
            with contextlib.closing(file.rows()) as rows:
                if len(self.files) == 1:
                    yield from rows
                else:
                    yield from (replace(row, place=f"{file.name}: {row.place}") for row in rows)

    def first(self) -> Row:
        with contextlib.closing(self.rows()) as rows:
            return next(rows)

    def lines(self, dialect: Dialect | None = None) -> Iterator[Line | BadLine]:
        """Parse row by row; a bad row does not stop the others."""
        dialect = dialect or PlainRows()
        seen = SeenIds() if dialect.has_unique_ids else None
        for index, row in enumerate(self.rows()):
            line = dialect.parse(row, index)
            if seen is not None and isinstance(line.id, str) and not seen.add(line.id):
                yield BadLine(index, line.id, f"{row.place}: an earlier row has the id {line.id!r} too")
            else:
                yield line


def read_prompts(names: Sequence[str], stdin: BinaryIO) -> Prompts:
    """Examine the files that names and patterns mean, in their order; `-` is standard input. Raises InvalidRequest."""
    files = [_examine_copy("standard input", stdin) if name == STDIN else _examine(name) for name in find_files(names)]
    if not any(file.num_rows for file in files):
        raise InvalidRequest(f"{', '.join(file.name for file in files)}: no prompts: it is empty")
    return Prompts(files)


def find_files(names: Sequence[str]) -> list[str]:
    """Patterns such as `part-*.jsonl` stand for their files, sorted by name. Raises InvalidRequest."""
    found: list[str] = []
    for name in names:
        if name == STDIN or os.path.exists(name) or not glob.has_magic(name):
            found.append(name)
        elif matches := sorted(path for path in glob.glob(name, recursive=True) if not os.path.isdir(path)):
            found += matches
        else:
            raise InvalidRequest(f"{name}: no file matches")
    seen: set[str] = set()
    for name in found:
        place = name if name == STDIN else os.path.realpath(name)
        if place in seen:
            raise InvalidRequest(f"{name}: named twice; its prompts would run twice")
        seen.add(place)
    return found


def read_text(argument: str, stdin: BinaryIO) -> str:
    """A prompt from the command line, in UTF-8 whatever the locale; `-` is standard input. Raises InvalidRequest."""
    try:
        return (stdin.read() if argument == STDIN else os.fsencode(argument)).decode("utf-8-sig")
    except (OSError, UnicodeError) as error:
        name = "standard input" if argument == STDIN else "the prompt"
        raise InvalidRequest(f"{name}: cannot be read as UTF-8 text: {error}") from None


def read_lines(raws: Iterable[bytes]) -> Iterator[Line | BadLine]:
    """Parse lines of JSON that are no file. A bad line does not stop the others."""
    parse = PlainRows().parse
    for index, row in enumerate(JsonLines().rows(raws)):
        yield parse(row, index)


def _examine(path: str) -> PromptFile:
    with _readable(path), open(path, "rb") as file:
        if not file.seekable():
            return _examine_copy(path, file)
        return _examined(path, file, lambda: open(path, "rb"))


def _examine_copy(name: str, stream: BinaryIO) -> PromptFile:
    """A stream can be read once, so a copy of it lies on disk, without a name, until the process ends."""
    with _readable(name):
        copy: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  # read again when the prompts run
        shutil.copyfileobj(stream, copy, COPY_BYTES)
        copy.flush()
        return _examined(name, copy, lambda: _rewound(copy))


def _examined(
    name: str, file: BinaryIO, again: Callable[[], contextlib.AbstractContextManager[BinaryIO]]
) -> PromptFile:
    file.seek(0)
    digest = hashlib.sha256()
    while block := file.read(COPY_BYTES):
        digest.update(block)
    file.seek(0)
    container = find_container(file)
    return PromptFile(name, again, container, container.count(file), digest.hexdigest(), _changed_at(file))


@contextlib.contextmanager
def _rewound(file: BinaryIO) -> Iterator[BinaryIO]:
    file.seek(0)
    yield file


def _changed_at(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_mtime_ns


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    """Errors of reading as the user is told of them."""
    try:
        yield
    except Unreadable as error:
        raise InvalidRequest(f"{name}: {error}") from None
    except FileNotFoundError:
        raise InvalidRequest(f"{name}: no such file") from None
    except OSError as error:
        raise InvalidRequest(f"{name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name}: cannot be read as UTF-8 text: {error}") from None
