"""What the user types: lines with editing and a history on a terminal, plain lines from a pipe; several as one message.

A line that ends with a backslash continues on the next one. Three quotes open a text that three quotes close.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

from gapless import console
from gapless.errors import InvalidRequest

MORE = "... "
QUOTES = '"""'
MAX_HISTORY = 1000
_OPENS = re.compile(r'\s*(?:/\w+\s+)?"""')  # a message, or the text of a command


class LineSource(Protocol):
    """Lines, one after the other."""

    def read(self, prompt: str) -> str | None:
        """The next line without its end; None when there are no more. Raises InvalidRequest for one that is no text."""


class PipedLines:
    """Lines of a file or a pipe: UTF-8, whatever the locale. Prompts are not shown."""

    def __init__(self) -> None:
        self._stream = console.stdin()
        self._is_first = True

    def read(self, prompt: str) -> str | None:
        raw = self._stream.readline()
        text = _decoded(raw.removeprefix(b"\xef\xbb\xbf") if self._is_first else raw)
        self._is_first = False
        return text.rstrip("\r\n") if raw else None


class TypedLines:
    """Lines of a terminal, edited by readline where Python has it, and kept in a history file."""

    def __init__(self, names: Sequence[str], history: Path | None) -> None:
        self._names = names
        self._history = history
        self._readline = _readline() if sys.stdout.isatty() else None
        if self._readline is not None:
            _bind(self._readline)
            self._readline.set_completer(self._complete)
            self._readline.set_completer_delims(" ")
            if history is not None:
                with contextlib.suppress(OSError):
                    self._readline.read_history_file(history)

    def read(self, prompt: str) -> str | None:
        try:
            if sys.stdout.isatty():
                return _decoded(os.fsencode(input(prompt)))
            console.say(prompt, end="")  # standard output has the answers only
            line = sys.stdin.readline()
            return _decoded(os.fsencode(line)).rstrip("\r\n") if line else None
        except EOFError:
            return None

    def close(self) -> None:
        """Keep the history; a history that cannot be written is no reason to complain."""
        if self._readline is None or self._history is None:
            return
        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))  # for its owner only
            self._readline.set_history_length(MAX_HISTORY)
            self._readline.write_history_file(self._history)

    def _complete(self, text: str, number: int) -> str | None:
        found = [name for name in self._names if name.startswith(text)] if text.startswith("/") else []
        return found[number] if number < len(found) else None


def read_message(lines: LineSource, prompt: str) -> str | None:
    """One message, which may have several lines; None when there are no more."""
    line = lines.read(prompt)
    if line is None:
        return None
    if _OPENS.match(line):
        return _quoted(lines, line)
    parts = [line]
    while parts[-1].endswith("\\") and (line := lines.read(MORE)) is not None:
        parts[-1] = parts[-1][:-1]
        parts.append(line)
    return "\n".join(parts)


def _quoted(lines: LineSource, line: str) -> str:
    """The text between the quotes, after what stands before them. The end of input closes it too."""
    before, _, text = line.partition(QUOTES)
    parts = [text]
    while not parts[-1].rstrip().endswith(QUOTES) and (more := lines.read(MORE)) is not None:
        parts.append(more)
    parts[-1] = parts[-1].rstrip().removesuffix(QUOTES)
    return before + "\n".join(parts).strip("\n")


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the line is not UTF-8 text: {error}") from None


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # Python on Windows, and builds without the library
        return None
    return readline


def _bind(readline: ModuleType) -> None:
    is_editline = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_editline else "tab: complete")
