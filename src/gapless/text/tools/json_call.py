"""Reads one call that is written as a JSON object: `{"name": "f", "arguments": {...}}`, in pieces.

Arguments that are an object are passed on as they are written, character by character. Whether they are valid is for
the grammar or the client to say. Names the keys that formats use, and does not know their tags.
"""

from __future__ import annotations

import json
from collections.abc import Callable

NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("id", "type")
KEYS = (*NAME_KEYS, *ARGUMENT_KEYS, *OTHER_KEYS)
EMPTY = "{}"


class JsonValue:
    """Finds the end of a JSON value by its brackets and quotes."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.first = ""

    def feed(self, char: str) -> bool:
        """Whether the value goes on after this character, which belongs to it."""
        self.first = self.first or char
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return self._in_string or self._depth > 0

    def ends_before(self, char: str) -> bool:
        """Whether a number or a word is complete, because this character follows it."""
        return self.first not in ("", '"', "{", "[") and (char in ",}]" or char.isspace())


class JsonCall:
    """A `CallReader`."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = False
        self.has_failed = False
        self._state: Callable[[str], bool] = self._open
        self._key = ""
        self._value = JsonValue()
        self._written: list[str] = []  # characters of the string or the value that is being read
        self._arguments: list[str] | None = None  # not taken yet; None: not seen yet
        self._streams = False

    def feed(self, text: str) -> int:
        for index, char in enumerate(text):
            was_named = self.name is not None
            if not self._state(char):
                self.has_failed = True
                return index
            if self.is_done or (self.name is not None and not was_named):
                return index + 1
        return len(text)

    def take_arguments(self) -> str:
        if self._arguments is None:
            return EMPTY if self.is_done else ""
        taken = "".join(self._arguments)
        self._arguments = []
        return taken

    # Each state reads one character; False means that it cannot be part of a call.

    def _open(self, char: str) -> bool:
        self._state = self._key_begins
        return char == "{"

    def _key_begins(self, char: str) -> bool:
        if char == '"':
            self._written, self._value = [], JsonValue()
            self._state = self._read_key
            return self._read_key(char)
        return char.isspace()

    def _read_key(self, char: str) -> bool:
        self._written.append(char)
        if self._value.feed(char):
            return True
        self._key = str(_parsed("".join(self._written)))
        self._state = self._colon
        return self._key in KEYS

    def _colon(self, char: str) -> bool:
        if char == ":":
            self._written, self._value = [], JsonValue()
            self._state = self._value_begins
            return True
        return char.isspace()

    def _value_begins(self, char: str) -> bool:
        if char.isspace():
            return True
        if char in ",:}]":
            return False
        self._streams = char == "{" and self._key in ARGUMENT_KEYS and self._arguments is None
        if self._streams:
            self._arguments = []
        self._state = self._read_value
        return self._read_value(char)

    def _read_value(self, char: str) -> bool:
        if self._value.ends_before(char):
            return self._end_value() and self._after_value(char)
        goes_on = self._value.feed(char)
        (self._arguments if self._streams and self._arguments is not None else self._written).append(char)
        is_bracketed = self._value.first in '"{['
        return self._end_value() if is_bracketed and not goes_on else True

    def _end_value(self) -> bool:
        self._state = self._after_value
        if self._key in NAME_KEYS and self.name is None:
            name = _parsed("".join(self._written))
            self.name = name if isinstance(name, str) else None
            return isinstance(name, str)
        if self._key in ARGUMENT_KEYS and self._arguments is None:
            self._arguments = [_as_arguments("".join(self._written))]
        return True

    def _after_value(self, char: str) -> bool:
        if char == ",":
            self._state = self._key_begins
            return True
        if char == "}":
            self.is_done = self.name is not None
            return self.is_done
        return char.isspace()


class JsonArguments:
    """A `CallReader` of a call whose name is known already: what is left is one JSON object, its arguments."""

    def __init__(self, name: str) -> None:
        self.name: str | None = name
        self.is_done = False
        self.has_failed = False
        self._value = JsonValue()
        self._text: list[str] = []

    def feed(self, text: str) -> int:
        for index, char in enumerate(text):
            if not self._value.first:
                if char.isspace():
                    continue
                if char != "{":
                    self.has_failed = True
                    return index
            self._text.append(char)
            if not self._value.feed(char):
                self.is_done = True
                return index + 1
        return len(text)

    def take_arguments(self) -> str:
        taken, self._text = "".join(self._text), []
        return taken


def _parsed(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return None


def _as_arguments(written: str) -> str:
    """Arguments that are not an object: some models write the object as a string, and null for none."""
    value = _parsed(written)
    if isinstance(value, str):
        return value or EMPTY
    return EMPTY if value is None and written.strip() == "null" else written
