"""Prompt files and result files of `gapless run`: one JSON object a line.

Owns both formats, and the promise that nothing done is lost: results go to `OUT.part` as they finish, and become `OUT`,
in input order, when all are there. A part file remembers what it belongs to, so that the same command goes on with it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from gapless.client import Completion
from gapless.core.outcome import TokenLogprob
from gapless.errors import ConfigError, InvalidRequest

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a prompt file: a prompt or messages, an id, and sampling parameters."""

    index: int  # counted from 0, empty lines not counted
    id: str | int
    prompt: Any  # text or token ids; None when `messages` is set
    messages: Any
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be run, and why."""

    index: int
    id: str | int
    error: str


def read_lines(text: str) -> Iterator[Line | BadLine]:
    """Parse a prompt file. A bad line does not stop the others."""
    index = 0
    for number, raw in enumerate(text.split("\n"), start=1):
        if raw.strip():
            yield _parse(raw, number, index)
            index += 1


def _parse(raw: str, number: int, index: int) -> Line | BadLine:
    try:
        value = json.loads(raw)
    except json.JSONDecodeError as error:
        return BadLine(index, index, f"line {number}: not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # a number or a nesting without end
        return BadLine(index, index, f"line {number}: not JSON that can be read: {error}")
    if not isinstance(value, dict):
        return BadLine(index, index, f"line {number}: must be an object, got {type(value).__name__}")
    given = value.pop("id", None)
    name = index if given is None else given
    if not isinstance(name, (str, int)) or isinstance(name, bool):
        return BadLine(index, index, f"line {number}: id must be text or a whole number, got {name!r}")
    if ("prompt" in value) == ("messages" in value):
        return BadLine(index, name, f"line {number}: needs either 'prompt' or 'messages'")
    return Line(index, name, value.pop("prompt", None), value.pop("messages", None), value)


def result_record(line: Line, completion: Completion, *, token_ids: bool) -> Record:
    """What the result file says of a completion."""
    record: Record = {"index": line.index, "id": line.id, "text": completion.text}
    if completion.error is not None:
        return {"index": line.index, "id": line.id, "error": completion.error}
    if token_ids:
        record["token_ids"] = list(completion.token_ids)
    record["finish_reason"] = completion.finish_reason
    record["num_prompt_tokens"] = len(completion.prompt_token_ids)
    record["num_tokens"] = len(completion.token_ids)
    for name, found in (("logprobs", completion.logprobs), ("prompt_logprobs", completion.prompt_logprobs)):
        if found is not None:
            record[name] = [_logprob_record(item) for item in found]
    return record


def _logprob_record(item: TokenLogprob | None) -> Record | None:
    if item is None:
        return None
    return {"token": item.token, "logprob": item.logprob, "rank": item.rank, "top": item.top}


def error_record(index: int, name: str | int, error: str) -> Record:
    """What the result file says of a line that could not be run."""
    return {"index": index, "id": name, "error": error}


def read_prompts(path: str, stdin: TextIO) -> str:
    """The text of a prompt file; `-` is standard input."""
    try:
        text = stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidRequest(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: cannot be read as UTF-8 text: {error}") from None
    if not text.strip():
        raise InvalidRequest(f"{path}: no prompts: the file is empty")
    return text


def fingerprint(text: str, settings: Mapping[str, Any]) -> str:
    """What a part file must have been made from to be continued."""
    return hashlib.sha256(json.dumps([text, dict(settings)], sort_keys=True).encode()).hexdigest()[:16]


class ResultFile:
    """Results on their way to a file. Use `add` for each, then `finish`; `close` keeps the part file as it is."""

    def __init__(self, path: Path, belongs_to: str, *, restart: bool) -> None:
        self.path = path
        self.part = path.with_name(path.name + ".part")
        if not path.parent.is_dir() or path.is_dir():
            raise ConfigError(
                f"{path}: cannot be written: {'is a directory' if path.is_dir() else 'no such directory'}"
            )
        self.records: dict[int, Record] = {}
        if self.part.exists() and not restart:
            self._resume(belongs_to)
        self.num_resumed = len(self.records)
        self._belongs_to = belongs_to
        self._file: TextIO | None = None  # opened with the first result

    def add(self, record: Record) -> None:
        """Keep a result, on disk before this returns."""
        if self._file is None:
            self._file = self._open()
        self.records[record["index"]] = record
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def finish(self) -> None:
        """Write all results in input order, and put the file in its place in one move."""
        self.close()
        ordered = "".join(json.dumps(self.records[i], ensure_ascii=False) + "\n" for i in sorted(self.records))
        self.part.write_text(ordered, encoding="utf-8")
        os.replace(self.part, self.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> TextIO:
        """Begin the part file anew, with what was resumed."""
        file = self.part.open("w", encoding="utf-8")
        for record in ({"part_of": self._belongs_to}, *self.records.values()):
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        return file

    def _resume(self, belongs_to: str) -> None:
        found = list(_whole_lines(self.part))
        if not found or found[0].get("part_of") != belongs_to:
            raise ConfigError(
                f"{self.part} holds results of another run (other prompts, model or parameters); "
                "move it away, or add --restart to overwrite it"
            )
        self.records = {record["index"]: record for record in found[1:] if "error" not in record}


def _whole_lines(path: Path) -> Iterator[Record]:
    """Records of a part file; a last line cut off in the middle is dropped."""
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return
