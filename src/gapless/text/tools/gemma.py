"""Gemma 4 and FunctionGemma: `call:f{city:<escape>Oslo<escape>,days:3}` between tags, with strings between marks.

Arguments are translated to JSON as they come in, and JSON to them where the engine itself writes a call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from gapless.text.stop import open_start
from gapless.text.tools.base import CallFrame, TagShape, ToolFormat, new_call_id
from gapless.text.tools.call_parser import CallSyntax
from gapless.text.tools.gemma_shape import GemmaShapes

HEAD = "call:"
OF_NAMES = "_.-"  # besides letters and digits
AT_ONCE = 1024  # characters shown to a state: more than any tag, and not so many that copies take long
WORDS = {"True": "true", "False": "false", "None": "null"}  # spellings of Python


class Gemma(ToolFormat):
    def __init__(self, name: str, begin: str, end: str, quote: str) -> None:
        self.name = name
        self._begin, self._end, self._quote = begin, end, quote
        self.syntax = CallSyntax((begin,), (end,), HEAD[0], lambda tools: GemmaCall(quote), new_call_id, marks=(quote,))

    def fits(self, template: str) -> bool:
        return self._begin in template

    def frame(self, tool: str) -> CallFrame:
        return CallFrame((self._begin, HEAD, tool), (self._end,), ())

    def arguments_shape(self, schema: Any) -> TagShape:
        return GemmaShapes(self._quote, schema).root()

    def spelled(self, arguments: Any) -> str:
        match arguments:
            case str():
                return f"{self._quote}{arguments}{self._quote}"
            case Mapping():
                return "{" + ",".join(f"{key}:{self.spelled(value)}" for key, value in arguments.items()) + "}"
            case list():
                return "[" + ",".join(map(self.spelled, arguments)) + "]"
            case _:
                return json.dumps(arguments)


class GemmaCall:
    """A `CallReader`. Each state reads some of a text and returns how much; none means that it needs more text."""

    def __init__(self, quote: str) -> None:
        self.name: str | None = None
        self.is_done = False
        self.has_failed = False
        self._quote = quote
        self._head = ""
        self._word = ""  # a key, a number or a name that is being read
        self._closers: list[str] = []  # of the open brackets
        self._json: list[str] = []  # not taken yet
        self._state: Callable[[str], int] = self._read_head

    def feed(self, text: str) -> int:
        place, was_named = 0, self.name is not None
        while place < len(text) and not (self.is_done or self.has_failed):
            count = self._state(text[place : place + AT_ONCE])
            place += count
            if count == 0 or (self.name is not None and not was_named):
                break
        return place

    def take_arguments(self) -> str:
        taken, self._json = "".join(self._json), []
        return taken

    def _fail(self) -> int:
        self.has_failed = True
        return 0

    def _read_head(self, text: str) -> int:
        char, place = text[0], len(self._head)
        if place < len(HEAD):
            if char != HEAD[place]:
                return self._fail()
        elif char == "{" and place > len(HEAD):
            self.name, self._state = self._head[len(HEAD) :], self._value
            return self._value(text)
        elif not (char.isalnum() or char in OF_NAMES):
            return self._fail()
        self._head += char
        return 1

    def _value(self, text: str) -> int:
        if text.startswith(self._quote):
            self._json.append('"')
            self._state = self._string
            return len(self._quote)
        if self._quote.startswith(text):
            return 0
        if text[0] in "{[":
            self._json.append(text[0])
            self._closers.append("}" if text[0] == "{" else "]")
            self._state = self._first
        elif text[0] in ",:}]":
            return self._fail()
        elif not text[0].isspace():
            self._word, self._state = "", self._scalar
            return self._scalar(text)
        return 1

    def _string(self, text: str) -> int:
        place = text.find(self._quote)
        cut = place if place >= 0 else open_start(text, self._quote)
        self._json.append(json.dumps(text[:cut], ensure_ascii=False)[1:-1])
        if place < 0:
            return cut
        self._json.append('"')
        self._state = self._after
        return place + len(self._quote)

    def _scalar(self, text: str) -> int:
        if text[0] not in ",}]":
            self._word += text[0]
            return 1
        self._json.append(_as_json(self._word.strip()))
        self._state = self._after
        return self._after(text)

    def _first(self, text: str) -> int:
        """In an open bracket: its end, or its first member."""
        if text[0] == self._closers[-1]:
            return self._after(text)
        if not text[0].isspace():
            return self._begin_member(text)
        return 1

    def _begin_member(self, text: str) -> int:
        self._word = ""
        self._state = self._key if self._closers[-1] == "}" else self._value
        return self._state(text)

    def _key(self, text: str) -> int:
        if text[0] in ",{}[]":
            return self._fail()
        if text[0] != ":":
            self._word += text[0]
            return 1
        key = self._word.strip().removeprefix(self._quote).removesuffix(self._quote)
        self._json.append(f"{json.dumps(key, ensure_ascii=False)}: ")
        self._state = self._value
        return 1

    def _after(self, text: str) -> int:
        if text[0] == self._closers[-1]:
            self._json.append(self._closers.pop())
            self.is_done, self._state = not self._closers, self._after
        elif text[0] == ",":
            self._json.append(", ")
            self._state = self._next
        elif not text[0].isspace():
            return self._fail()
        return 1

    def _next(self, text: str) -> int:
        return 1 if text[0].isspace() else self._begin_member(text)


def _as_json(word: str) -> str:
    try:
        json.loads(word)
    except ValueError:
        return WORDS.get(word, json.dumps(word, ensure_ascii=False))
    return word
