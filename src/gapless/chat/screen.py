"""What a conversation looks like: answers as they come, reasoning and notes dimmed, tool calls as lines.

Standard output gets the answers and the tool calls. Reasoning and notes go there on a terminal only, otherwise to
standard error, so that a script reads answers and nothing else. Colours, and the escape of control characters that a
model may write, are a terminal's too.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

from gapless import console
from gapless.text.deltas import CallArguments, CallBegin, Content, Reasoning, ReplyDelta

DIM, RED, CYAN, PLAIN = "\x1b[2m", "\x1b[31m", "\x1b[36m", "\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line feed


class Screen:
    """Where an answer is shown. Knows what was written last, so that a change of kind begins a line."""

    def __init__(self, *, colour: bool) -> None:
        self._out: TextIO = sys.stdout
        self._is_terminal = self._out.isatty()
        self._colour = colour and self._is_terminal
        self._kind: object = None  # of what the open line shows; None: no line is open
        self._ends_line = True
        self._thinks_aside = False  # reasoning on standard error, in an open line

    def show(self, part: ReplyDelta) -> None:
        """A part of an answer."""
        match part:
            case Content(text):
                self._write("text", text)
            case Reasoning(text):
                self._think(text)
            case CallBegin(index, _, name):
                self._write(("call", index), f"-> {name} ", CYAN)
            case CallArguments(index, text):
                self._write(("call", index), text, CYAN)

    def close_line(self) -> None:
        """The answer is over, or stops here."""
        self._end_thoughts()
        if self._kind is not None and not self._ends_line:
            self._put("\n")
        self._kind = None

    def note(self, text: str) -> None:
        """A remark about the conversation."""
        self._say(text, DIM)

    def error(self, text: str) -> None:
        self._say(f"error: {text}", RED)

    def tell(self, text: str) -> None:
        """What a command was asked for."""
        self.close_line()
        self._put(self._safe(text) + "\n")

    def _think(self, text: str) -> None:
        if self._is_terminal:
            self._write("reasoning", text, DIM)
        else:
            console.say(text, end="")
            self._thinks_aside = True

    def _end_thoughts(self) -> None:
        if self._thinks_aside:
            console.say("")
        self._thinks_aside = False

    def _write(self, kind: object, text: str, colour: str = "") -> None:
        self._end_thoughts()
        if self._kind != kind:
            self.close_line()
        self._kind = kind
        self._put(self._painted(text, colour))
        self._ends_line = text.endswith("\n") or (self._ends_line and not text)

    def _say(self, text: str, colour: str) -> None:
        self.close_line()
        if self._is_terminal:
            self._put(self._painted(text, colour) + "\n")
        else:
            console.say(f"gapless: {text}")

    def _painted(self, text: str, colour: str) -> str:
        text = self._safe(text)
        return f"{colour}{text}{PLAIN}" if colour and self._colour and text else text

    def _safe(self, text: str) -> str:
        return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text) if self._is_terminal else text

    def _put(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
