"""The arguments of Gemma's calls as structural tags, from a JSON schema: they are not JSON, so no schema fits them.

Enforces types, properties, required ones, enums, constants, lengths, patterns, items and unions. A keyword that it
cannot enforce is an error, not ignored. Objects have the properties that the schema lists and no others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gapless.errors import InvalidRequest
from gapless.text.tools.base import TagShape

KNOWN = frozenset(
    (
        *("type", "properties", "required", "enum", "const", "items", "anyOf", "oneOf", "$ref", "$defs", "definitions"),
        *("additionalProperties", "pattern", "minLength", "maxLength", "minItems", "maxItems", "title", "description"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("default", "examples", "$schema", "$id"),
    )
)
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
SCALAR = {"type": ["number", "boolean", "null"]}
KEY = {"type": "regex", "pattern": r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"}
FREE_DEPTH = 3  # of values that a schema leaves open
MAX_REFERENCES = 16  # inside each other
MAX_VALUES = 2000  # in the schema of one tool, with what its references stand for
MAX_MEMBERS = 100  # of an object, or counted ones of an array
NOTHING: TagShape = {"type": "const_string", "value": ""}


class GemmaShapes:
    """For one tool. Raises InvalidRequest."""

    def __init__(self, quote: str, schema: Any) -> None:
        self._quote = quote
        self._schema = schema
        self._num_values = 0

    def root(self) -> TagShape:
        return self._object(self._schema, 0)

    def _value(self, schema: Any, depth: int) -> TagShape:
        self._num_values += 1
        _check_size(self._num_values, MAX_VALUES, "values")
        if not isinstance(schema, Mapping) or not schema:
            return self._free(FREE_DEPTH)
        for name in schema:
            if name not in KNOWN:
                raise InvalidRequest(f"the schema's {name!r} cannot be enforced in the calls of this model", "tools")
        if "$ref" in schema:
            return self._value(self._referred(str(schema["$ref"]), depth), depth + 1)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return _either([self._value(each, depth) for each in schema[name]])
        if "const" in schema or "enum" in schema:
            return _either([_text(self._spelled(value)) for value in schema.get("enum", [schema.get("const")])])
        kinds = schema.get("type", "object" if "properties" in schema else None)
        if kinds is None:
            return self._free(FREE_DEPTH)
        return _either([self._kind(kind, schema, depth) for kind in ([kinds] if isinstance(kinds, str) else kinds)])

    def _kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> TagShape:
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case _:  # numbers and words are spelled as in JSON
                limits = {name: schema[name] for name in NUMBERS if name in schema}
                return _json({"type": kind, **limits})

    def _referred(self, reference: str, depth: int) -> Any:
        if depth > MAX_REFERENCES:
            raise InvalidRequest(
                "a schema that refers to itself cannot be enforced in the calls of this model", "tools"
            )
        found = self._schema
        for part in reference.removeprefix("#").split("/")[1:]:
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def _string(self, schema: Mapping[str, Any]) -> TagShape:
        if "pattern" in schema:
            return self._quoted(
                {"type": "regex", "pattern": str(schema["pattern"]).removeprefix("^").removesuffix("$")}
            )
        if "minLength" in schema or "maxLength" in schema:
            most = schema.get("maxLength", "")
            return self._quoted({"type": "regex", "pattern": rf"(.|\n){{{schema.get('minLength', 0)},{most}}}"})
        return {"type": "tag", "begin": self._quote, "content": {"type": "any_text"}, "end": self._quote}

    def _quoted(self, content: TagShape) -> TagShape:
        return {"type": "tag", "begin": self._quote, "content": content, "end": self._quote}

    def _array(self, schema: Mapping[str, Any], depth: int) -> TagShape:
        item = self._value(schema.get("items", {}), depth + 1)
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        _check_size(max(least, most or 0), MAX_MEMBERS, "items")
        if most is None:
            more = _list(item, at_least_one=False)
            needed = [part for _ in range(least) for part in (item, _text(","))]
            items = (
                _sequence([*needed[:-1], _either([NOTHING, _sequence([_text(","), _list(item)])])]) if least else more
            )
        else:
            items = _counted(item, least, int(most))
        return _sequence([_text("["), items, _text("]")])

    def _object(self, schema: Mapping[str, Any], depth: int) -> TagShape:
        properties = schema.get("properties") or {}
        if not properties:
            return self._free_object(FREE_DEPTH) if schema.get("additionalProperties") is not False else _text("{}")
        _check_size(len(properties), MAX_MEMBERS, "properties of an object")
        required = schema.get("required", ())
        members = [
            (_sequence([_text(f"{name}:"), self._value(each, depth + 1)]), name in required)
            for name, each in properties.items()
        ]
        return _sequence([_text("{"), _members(members), _text("}")])

    # -- values that the schema leaves open --------------------------------------------------------------------------

    def _free(self, depth: int) -> TagShape:
        scalars, string = _json(SCALAR), self._string({})
        if depth == 0:
            return _either([scalars, string])
        array = _sequence([_text("["), _list(self._free(depth - 1), at_least_one=False), _text("]")])
        return _either([scalars, string, array, self._free_object(depth)])

    def _free_object(self, depth: int) -> TagShape:
        member = _sequence([KEY, _text(":"), self._free(depth - 1)])
        return _sequence([_text("{"), _list(member, at_least_one=False), _text("}")])

    def _spelled(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, (list, Mapping)):
            raise InvalidRequest("lists and objects in an enum cannot be enforced in the calls of this model", "tools")
        return json.dumps(value)


def _check_size(size: int, most: int, what: str) -> None:
    if size > most:
        raise InvalidRequest(f"more than {most} {what} cannot be enforced in the calls of this model", "tools")


def _members(members: Sequence[tuple[TagShape, bool]]) -> TagShape:
    """Members with commas between those that are there. Nothing was written before the first."""
    if not members:
        return NOTHING
    (first, is_required), rest = members[0], members[1:]
    written = _sequence([first, *(_maybe(_sequence([_text(","), each]), needed) for each, needed in rest)])
    return written if is_required else _either([written, _members(rest)])


def _maybe(shape: TagShape, is_required: bool) -> TagShape:
    return shape if is_required else _either([shape, NOTHING])


def _counted(item: TagShape, least: int, most: int) -> TagShape:
    """Between so many and so many items."""
    found: TagShape = NOTHING
    for number in range(most, 0, -1):
        here = [item, found] if number == 1 else [_text(","), item, found]
        found = _maybe(_sequence(here), number <= least)
    return found


def _list(item: TagShape, *, at_least_one: bool = True) -> TagShape:
    tag = {"type": "tag", "begin": "", "content": item, "end": ""}
    return {"type": "tags_with_separator", "tags": [tag], "separator": ",", "at_least_one": at_least_one}


def _json(schema: TagShape) -> TagShape:
    return {"type": "json_schema", "json_schema": schema}


def _text(value: str) -> TagShape:
    return {"type": "const_string", "value": value}


def _sequence(elements: list[TagShape]) -> TagShape:
    return {"type": "sequence", "elements": elements}


def _either(elements: list[TagShape]) -> TagShape:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}
