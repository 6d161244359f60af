"""The programs of shapes that are regular languages: choices, and JSON schemas without recursion.

The language is the one that llguidance gives the same shape, so that either can be used. A shape that has no program
here, or a large one, is llguidance's to judge, and so is every shape that is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from gapless.core.structured import Structured
from gapless.guides.programs import COUNT, GATE, JUMP, MATCH, STRING, UNBOUNDED, NoProgram, Program, Writer

MAX_LETTERS = 512  # of all bounded strings together: each letter has some states
MAX_SPACES = 200  # places where white space may be: each has a state for every indentation
MAX_DEPTH = 32  # of values in values, $ref included

# Keywords that say nothing about the text.
NOTES = {"title", "description", "default", "examples", "$schema", "$comment", "deprecated", "readOnly", "writeOnly"}
OF_TYPE: Mapping[str, set[str]] = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": set(),
    "boolean": set(),
    "null": set(),
}
_ESCAPED = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # characters with several spellings, or none


def program_of(structured: Structured) -> Program | None:
    """The program of a shape; None where it has none."""
    writer = JsonWriter(has_space=structured.whitespace is None)
    try:
        if structured.kind == "choice":
            writer.one_of([partial(writer.text, text) for text in json.loads(structured.text)])
        elif structured.kind == "json_schema" and structured.whitespace in (None, ""):
            schema = json.loads(structured.text)
            writer.value(schema, schema, 0)
        else:
            return None
        writer.put(MATCH)
    except NoProgram:
        return None
    return Program(np.array(writer.code, np.int32), writer.num_counted)


class JsonWriter(Writer):
    """Writes the values that a schema accepts."""

    def __init__(self, *, has_space: bool) -> None:
        super().__init__()
        self.num_counted = 0  # commas of the counted array
        self._has_space = has_space
        self._num_letters = 0
        self._num_spaces = 0

    def value(self, schema: Any, root: Any, depth: int) -> None:
        """Any value that the schema accepts. root: where `$ref` looks."""
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            raise NoProgram
        keywords = set(schema) - NOTES - ({"$defs", "definitions"} if schema is root else set())
        if keywords == {"$ref"}:
            self.value(_referred(schema["$ref"], root), root, depth + 1)
        elif keywords == {"anyOf"}:
            self.one_of([partial(self.value, part, root, depth + 1) for part in _list(schema["anyOf"])])
        elif keywords in ({"const"}, {"const", "type"}):
            self._literals([schema["const"]], schema.get("type"))
        elif keywords in ({"enum"}, {"enum", "type"}):
            self._literals(_list(schema["enum"]), schema.get("type"))
        else:
            types = [schema["type"]] if isinstance(schema.get("type"), str) else _list(schema.get("type"))
            if not keywords <= {"type"}.union(*(OF_TYPE.get(str(name), set()) for name in types)):
                raise NoProgram
            self.one_of([partial(self._typed, name, schema, root, depth) for name in types])

    def space(self) -> None:
        if not self._has_space:
            return
        self._num_spaces += 1
        if self._num_spaces > MAX_SPACES:
            raise NoProgram
        self.put_space()

    def _typed(self, name: object, schema: dict[str, Any], root: Any, depth: int) -> None:
        match name:
            case "object":
                self._object(schema, root, depth)
            case "array":
                self._array(schema, root, depth)
            case "string":
                self._string(*_bounds(schema, "minLength", "maxLength"))
            case "integer":
                self._integer(*_range(schema))
            case "number":
                self._number()
            case "boolean":
                self.one_of([partial(self.text, "true"), partial(self.text, "false")])
            case "null":
                self.text("null")
            case _:
                raise NoProgram

    def _literals(self, values: Sequence[object], kind: object) -> None:
        texts = dict.fromkeys(_literal(value, kind) for value in values)
        self.one_of([partial(self.text, text) for text in texts])

    def _string(self, fewest: int, most: int | None) -> None:
        self._num_letters += fewest if most is None else most
        if self._num_letters > MAX_LETTERS:
            raise NoProgram
        self.text('"')
        self.put(STRING, fewest, UNBOUNDED if most is None else most)

    def _number(self) -> None:
        self.maybe(partial(self.text, "-"))
        self._whole()
        self.maybe(self._fraction)
        self.maybe(self._exponent)

    def _fraction(self) -> None:
        self.text(".")
        self.digits(1)

    def _exponent(self) -> None:
        self.any_byte("EE", "ee")
        self.maybe(partial(self.any_byte, "++", "--"))
        self.digits(1)

    def _whole(self) -> None:
        self.one_of([partial(self.text, "0"), partial(self._between, "", None)])

    def _integer(self, low: int | None, high: int | None) -> None:
        if low is None and high is None:
            self.maybe(partial(self.text, "-"))
            self._whole()
        elif low is None or low < 0:
            raise NoProgram
        else:
            self.one_of([partial(self._between, *span) for span in _by_width(low, high)])

    def _between(self, low: str, high: str | None) -> None:
        """Numbers of one width, from one to the other; without the other, all that are wider."""
        if high is None:
            self.any_byte("19")
            self.digits(len(low))
        elif low == high:
            self.text(low)
        elif set(low) == {"0"} and set(high) == {"9"}:
            self.digits(len(low), len(low))
        else:
            self.one_of([partial(self._beginning, *part) for part in _by_first(low, high)])

    def _beginning(self, first: str, low: str, high: str) -> None:
        self.any_byte(first)
        self._between(low, high)

    def _array(self, schema: dict[str, Any], root: Any, depth: int) -> None:
        fewest, most = _bounds(schema, "minItems", "maxItems")
        is_counted = most is None and fewest > 1 and depth == 0  # there is one such array at most

        def item() -> None:
            self.value(schema.get("items"), root, depth + 1)

        def another() -> None:
            self.space()
            self.text(",")
            if is_counted:
                self.put(COUNT)
            self.space()
            item()

        def items() -> None:
            item()
            if is_counted:
                self.num_counted = fewest - 1
                self.repeat(another)
                self.put(GATE)
            else:
                self.repeat(another, max(fewest - 1, 0), None if most is None else most - 1)
            self.space()

        self.text("[")
        self.space()
        if fewest > 0:
            items()
        elif most != 0:
            self.maybe(items)
        self.text("]")

    def _object(self, schema: dict[str, Any], root: Any, depth: int) -> None:
        """Properties in the order of the schema; those that are not required may be passed by."""
        properties, required = schema.get("properties", {}), _list(schema.get("required", []))
        if schema.get("additionalProperties") is not False or not isinstance(properties, dict):
            raise NoProgram
        if not all(isinstance(name, str) and name in properties for name in required):
            raise NoProgram
        self.text("{")
        self.space()
        first, later = [self.put(JUMP)], list[int]()  # ways to here: before any property, and after some
        for name, of in properties.items():
            ways, passing, passing_later = list[int](), list[int](), list[int]()
            if later:
                self.land(later)
                passing_later += [] if name in required else [self.fork()]
                self.space()
                self.text(",")
                self.space()
                ways.append(self.put(JUMP))
            if first:
                self.land(first)
                passing += [] if name in required else [self.fork()]
                ways.append(self.put(JUMP))
            self.land(ways)
            self._property(name, of, root, depth)
            first, later = passing, [*passing_later, self.put(JUMP)]
        ends = []
        if later:
            self.land(later)
            self.space()
            ends.append(self.put(JUMP))
        self.land([*first, *ends])
        self.text("}")

    def _property(self, name: str, schema: Any, root: Any, depth: int) -> None:
        self.text(_literal(name, None))
        self.space()
        self.text(":")
        self.space()
        self.value(schema, root, depth + 1)


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise NoProgram
    return value


def _referred(path: object, root: Any) -> Any:
    """What a `$ref` within the schema means."""
    if not isinstance(path, str) or not path.startswith("#/") or "~" in path or "%" in path:
        raise NoProgram
    found = root
    for name in path[2:].split("/"):
        if not isinstance(found, dict) or name not in found:
            raise NoProgram
        found = found[name]
    return found


def _literal(value: object, kind: object) -> str:
    """A constant as JSON. Those that have several spellings are not written here."""
    kinds: Mapping[type, tuple[object, ...]] = {
        str: (None, "string"),
        int: (None, "integer", "number"),
        bool: (None, "boolean"),
        type(None): (None, "null"),
    }
    if isinstance(kind, list) or kind not in kinds.get(type(value), ()):
        raise NoProgram
    if isinstance(value, str) and _ESCAPED.search(value):
        raise NoProgram
    return json.dumps(value, ensure_ascii=False)


def _bounds(schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
    low, high = schema.get(least, 0), schema.get(most)
    if type(low) is not int or low < 0 or not (high is None or (type(high) is int and high >= low)):
        raise NoProgram
    return low, high


def _range(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The smallest and the largest integer."""
    given = [schema[name] for name in OF_TYPE["integer"] if name in schema]
    if any(type(number) is not int for number in given):
        raise NoProgram
    lows = [schema[name] + more for name, more in (("minimum", 0), ("exclusiveMinimum", 1)) if name in schema]
    highs = [schema[name] - less for name, less in (("maximum", 0), ("exclusiveMaximum", 1)) if name in schema]
    low, high = max(lows, default=None), min(highs, default=None)
    if low is not None and high is not None and low > high:
        raise NoProgram
    return low, high


def _by_width(low: int, high: int | None) -> Iterator[tuple[str, str | None]]:
    """A range of numbers in parts of equal width."""
    width, widest = len(str(low)), len(str(low if high is None else high))
    for digits in range(width, widest + 1):
        end = 10**digits - 1
        yield (
            str(max(low, 10 ** (digits - 1) if digits > 1 else 0)),
            str(end if high is None else min(high, end)),
        )
    if high is None:
        yield str(low), None


def _by_first(low: str, high: str) -> Iterator[tuple[str, str, str]]:
    """A range of numbers of one width in parts: a span of first digits, and the range of what follows."""
    rest = len(low) - 1
    zeros, nines = "0" * rest, "9" * rest
    if low[0] == high[0]:
        yield low[0] * 2, low[1:], high[1:]
        return
    first, last = int(low[0]), int(high[0])
    if low[1:] != zeros:
        yield low[0] * 2, low[1:], nines
        first += 1
    if high[1:] != nines:
        last -= 1
    if first <= last:
        yield f"{first}{last}", zeros, nines
    if high[1:] != nines:
        yield high[0] * 2, zeros, high[1:]
