"""Finds calls of tools in a text that arrives in pieces.

    content <begin> call separator call ... <end> content

Owns what every format shares: text outside calls, text held back because it may begin a tag, and text that looked like
a call and was none, which is content again. How one call is written is up to its reader (`json_call` and others).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gapless.text.deltas import CallArguments, CallBegin, Content, ReplyDelta
from gapless.text.stop import open_start

ToolSchemas = Mapping[str, Any]  # the parameters of each tool that may be called, by its name
SEPARATORS = ",;[]"  # between the calls of a group, besides spaces


class CallReader(Protocol):
    """Reads one call, from its first character to its last."""

    @property
    def name(self) -> str | None:
        """The tool's name, as soon as it is known."""
        ...

    @property
    def is_done(self) -> bool: ...

    @property
    def has_failed(self) -> bool:
        """This is no call, or a broken one."""
        ...

    def feed(self, text: str) -> int:
        """Read on; returns how many characters belong to the call."""
        ...

    def take_arguments(self) -> str:
        """The arguments that became known since the last time, as JSON text. Asked only once the name is known."""
        ...


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The frame of a format's calls."""

    begins: Sequence[str]  # each opens a group of calls
    ends: Sequence[str]
    openers: str  # a call begins with one of these characters; empty: with any but a separator
    new_reader: Callable[[ToolSchemas], CallReader]
    new_id: Callable[[], str]
    is_bare: bool = False  # an opener or a bracket at the very beginning of the text opens a group too
    marks: Sequence[str] = ()  # tags inside calls

    @property
    def tags(self) -> Sequence[str]:
        return (*self.begins, *self.ends, *self.marks)


class CallParser:
    """Text to deltas. A call of a tool that is not among `tools` is content."""

    def __init__(self, syntax: CallSyntax, tools: ToolSchemas) -> None:
        self._syntax = syntax
        self._tools = tools
        self._tags = (*syntax.begins, *syntax.ends)
        self._text = ""  # not read yet
        self._space = ""  # shown only if content follows: spaces around calls belong to the format
        self._raw = ""  # read already, and content if it turns out not to be a call
        self._reader: CallReader | None = None
        self._at_start = True  # nothing but spaces so far
        self._in_group = False
        self._is_pending = False  # the group has no call yet
        self._has_begun = False  # the call that is being read was told
        self._follows_call = False
        self._has_content = False
        self._num_calls = 0
        self._deltas: list[ReplyDelta] = []

    def push(self, text: str) -> list[ReplyDelta]:
        self._text += text
        while self._text and self._read():
            pass
        return self._take()

    def finish(self) -> list[ReplyDelta]:
        if not self._has_begun and (self._raw or not self._in_group):
            self._show(self._raw + self._text)
        if self._space:
            self._deltas.append(Content(self._space))
        self._text = self._raw = self._space = ""
        return self._take()

    def _take(self) -> list[ReplyDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _read(self) -> bool:
        """Read some of the text; False if more of it is needed to go on."""
        if self._reader is not None:
            return self._read_call(self._reader)
        return self._read_group() if self._in_group else self._read_content()

    # -- outside of calls --------------------------------------------------------------------------------------------

    def _read_content(self) -> bool:
        if self._at_start and self._syntax.is_bare:
            first = self._text.lstrip()[:1]
            if not first:
                return False
            if first in self._syntax.openers + "[":
                self._open_group("", 0)
                return True
        found = [(place, -len(tag), tag) for tag in self._syntax.begins if (place := self._text.find(tag)) >= 0]
        if found:
            place, _, tag = min(found)
            self._show(self._text[:place])
            self._open_group(tag, place + len(tag))
            return True
        cut = min((open_start(self._text, tag) for tag in self._syntax.begins), default=len(self._text))
        self._show(self._text[:cut])
        self._text = self._text[cut:]
        return False

    def _open_group(self, tag: str, end: int) -> None:
        self._at_start = False
        self._in_group = self._is_pending = True
        self._raw += tag
        self._text = self._text[end:]

    def _show(self, text: str) -> None:
        """Content, without the spaces next to a call; texts before and after a call are on lines of their own."""
        if self._follows_call:
            text = text.lstrip()
            self._space = "\n" if text and self._has_content else ""
        text = self._space + text
        words = text.rstrip()
        self._space = text[len(words) :]
        if words:
            self._has_content, self._at_start, self._follows_call = True, False, False
            self._deltas.append(Content(words))

    # -- between the calls of a group --------------------------------------------------------------------------------

    def _read_group(self) -> bool:
        tag = next((tag for tag in self._tags if self._text.startswith(tag)), None)
        if tag in self._syntax.begins:
            assert tag is not None
            self._open_group(tag, len(tag))
        elif tag is not None:
            self._raw += tag if self._is_pending else ""
            self._text = self._text[len(tag) :]
            self._leave_group()
        elif any(tag.startswith(self._text) for tag in self._tags):
            return False
        elif self._text[0].isspace() or self._text[0] in SEPARATORS:
            self._raw += self._text[0] if self._is_pending else ""
            self._text = self._text[1:]
        elif not self._syntax.openers or self._text[0] in self._syntax.openers:
            self._reader = self._syntax.new_reader(self._tools)
        else:
            self._leave_group()
        return True

    def _leave_group(self) -> None:
        """Back to content, with what was read in vain."""
        raw, self._raw = self._raw, ""
        self._in_group = self._is_pending = False
        self._reader = None
        self._show(raw)

    # -- inside a call -----------------------------------------------------------------------------------------------

    def _read_call(self, reader: CallReader) -> bool:
        count = reader.feed(self._text)
        if not self._has_begun:
            self._raw += self._text[:count]
        self._text = self._text[count:]
        if not self._has_begun and reader.name is not None:
            if reader.name not in self._tools:
                self._leave_group()
                return True
            self._begin_call(reader.name)
            count += 1  # progress even without a character
        if self._has_begun and (arguments := reader.take_arguments()):
            self._deltas.append(CallArguments(self._num_calls - 1, arguments))
        if reader.is_done or reader.has_failed:
            self._end_call()
            return True
        return count > 0

    def _begin_call(self, name: str) -> None:
        self._raw = self._space = ""
        self._is_pending = False
        self._has_begun = self._follows_call = True
        self._deltas.append(CallBegin(self._num_calls, self._syntax.new_id(), name))
        self._num_calls += 1

    def _end_call(self) -> None:
        if not self._has_begun:
            self._leave_group()
        self._reader = None
        self._has_begun = False
