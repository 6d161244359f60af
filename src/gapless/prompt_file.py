"""Prompt files: one JSON object a line.

Owns the format. A file is read line by line, and its fingerprint is computed on the way, so that only the parsed
prompts stay in memory.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from gapless.errors import InvalidRequest


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


@dataclass(frozen=True, slots=True)
class Prompts:
    """A prompt file that has been read."""

    lines: tuple[Line | BadLine, ...]
    digest: str  # of the bytes, wherever they came from

    def fingerprint(self, settings: Mapping[str, Any]) -> str:
        """Identifies a run by its prompts and settings; a part file is resumed by the same run only."""
        return hashlib.sha256(json.dumps([self.digest, dict(settings)], sort_keys=True).encode()).hexdigest()[:16]


def read_prompts(path: str, stdin: BinaryIO) -> Prompts:
    """Read a prompt file; `-` is standard input. Raises InvalidRequest."""
    name = "standard input" if path == "-" else path
    digest = hashlib.sha256()
    try:
        with contextlib.nullcontext(stdin) if path == "-" else open(path, "rb") as file:
            lines = tuple(read_lines(_hashed(file, digest)))
    except FileNotFoundError:
        raise InvalidRequest(f"{path}: no such file") from None
    except OSError as error:
        raise InvalidRequest(f"{name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name}: cannot be read as UTF-8 text: {error}") from None
    if not lines:
        raise InvalidRequest(f"{name}: no prompts: it is empty")
    return Prompts(lines, digest.hexdigest())


def read_text(argument: str, stdin: BinaryIO) -> str:
    """A prompt from the command line, in UTF-8 whatever the locale; `-` is standard input. Raises InvalidRequest."""
    try:
        return (stdin.read() if argument == "-" else os.fsencode(argument)).decode("utf-8-sig")
    except (OSError, UnicodeError) as error:
        name = "standard input" if argument == "-" else "the prompt"
        raise InvalidRequest(f"{name}: cannot be read as UTF-8 text: {error}") from None


def read_lines(raws: Iterable[bytes]) -> Iterator[Line | BadLine]:
    """Parse the lines of a prompt file. A bad line does not stop the others; only bytes that are not UTF-8 do."""
    index = 0
    for number, raw in enumerate(raws, start=1):
        text = raw.removeprefix(codecs.BOM_UTF8).decode() if number == 1 else raw.decode()
        if text and not text.isspace():
            yield _parse(text, number, index)
            index += 1


def _hashed(raws: Iterable[bytes], digest: Any) -> Iterator[bytes]:
    for raw in raws:
        digest.update(raw)
        yield raw


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
