"""What a format is. A container says how rows lie in a file, a dialect says what a row means; each is a file here.

Every result is one record on its way: an object with `index` first and, if the prompt failed, an `error` that is not
null. Part files hold records, whatever the format of the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol

from gapless.part_file import Record

if TYPE_CHECKING:  # it would load torch
    from gapless.client import Completion, Job
    from gapless.core.params import SamplingParams
    from gapless.llm import LLM
    from gapless.text.tokenizer import Tokenizer

Kind = Literal["text", "number", "ids", "json"]
Columns = Mapping[str, Kind]  # of results, for containers that have columns


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a file, before anybody knows what it means."""

    place: str  # for messages: "line 3"
    value: object = None
    error: str | None = None  # why it cannot be read


@dataclass(frozen=True, slots=True)
class Line:
    """A row that can be tried: a prompt or messages, an id, and sampling parameters."""

    index: int  # over all files, counted from 0, empty lines not counted
    id: str | int
    prompt: Any  # text or token ids; None when `messages` is set
    messages: Any
    params: Mapping[str, Any]
    template: Mapping[str, Any] = field(default_factory=dict)  # further values for the chat template
    defaults: Mapping[str, Any] = field(default_factory=dict)  # parameters where neither row nor flags have them
    origin: Any = None  # what the dialect needs to word the result


@dataclass(frozen=True, slots=True)
class BadLine:
    """A row that cannot be run, and why."""

    index: int
    id: str | int
    error: str


class Unreadable(Exception):
    """A file that is not what its container needs; the message does not name the file."""


class Container(Protocol):
    """How rows lie in a file. Rows are read and written a few at a time, whatever the size of the file."""

    def rows(self, file: BinaryIO) -> Iterator[Row]:
        """Raises Unreadable, and UnicodeDecodeError for text that is none."""

    def count(self, file: BinaryIO) -> int:
        """How many rows there are. Raises as `rows` does for a file that cannot be read to its end."""

    def write(self, records: Iterable[bytes], out: BinaryIO, columns: Columns) -> None:
        """Records as JSON objects, each without a line end. Raises OSError."""


class Dialect(Protocol):
    """What rows say, and what is said of their results."""

    columns: Columns
    has_index: bool  # results tell the index of their row
    has_unique_ids: bool  # a row whose id stands in an earlier row is refused

    def parse(self, row: Row, index: int) -> Line | BadLine: ...

    def job(self, llm: LLM, line: Line, params: SamplingParams) -> Job:
        """The line as work for the model. Raises InvalidRequest."""

    def result(self, line: Line, completion: Completion, tokenizer: Tokenizer | None) -> Record:
        """The record of a prompt that ran."""

    def error(self, line: Line | BadLine, message: str) -> Record:
        """The record of a prompt that could not run."""


@dataclass(frozen=True, slots=True)
class OutputForm:
    """How results are written."""

    container: Container
    columns: Columns
    has_index: bool = True

    def write(self, records: Iterable[bytes], out: BinaryIO) -> None:
        self.container.write(map(self.told, records), out, self.columns)

    def told(self, record: bytes) -> bytes:
        """A record as JSON, as the dialect shows it."""
        return record if self.has_index else b"{" + record[record.index(b", ") + 2 :]
