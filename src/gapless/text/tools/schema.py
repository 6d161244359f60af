"""The JSON schema of a tool's parameters: what is certainly wrong with it.

Finds wrong types of keywords, unknown type names and local references to nothing, with their place. It does not have to
find everything: a schema that the grammar enforces is read once more when the grammar is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
MAX_DEPTH = 64
MAX_SCHEMAS = 10_000  # of one request: checking them takes a tenth of a second
OF_SCHEMAS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
ONE_SCHEMA = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
LIST_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
TEXTS = ("$ref", "pattern", "format", "title", "description")


@dataclass(frozen=True, slots=True)
class Fault:
    place: str  # below the schema: ".properties.city.type"
    reason: str


class SchemaChecker:
    """Checks the schemas of one request; together they may have `most` schemas inside each other."""

    def __init__(self, most: int = MAX_SCHEMAS) -> None:
        self._most = most
        self._root: Mapping[str, Any] = {}

    def check(self, schema: object) -> Fault | None:
        """The first fault of a schema for an object of parameters, or None."""
        if not isinstance(schema, Mapping):
            return Fault("", "must be a JSON schema, which is an object")
        if schema.get("type", "object") != "object":
            return Fault(".type", f"the parameters of a tool are an object, not {schema.get('type')!r:.60}")
        self._root = schema
        return next(self._faults(schema, "", 0), None)

    def _faults(self, schema: object, place: str, depth: int) -> Iterator[Fault]:
        self._most -= 1
        if isinstance(schema, bool):
            return
        if not isinstance(schema, Mapping):
            yield Fault(place, f"must be a schema, not {schema!r:.60}")
            return
        if depth > MAX_DEPTH:
            yield Fault(place, f"the schema is nested more than {MAX_DEPTH} levels deep")
            return
        if self._most < 0:
            yield Fault("", f"the tools have more than {MAX_SCHEMAS} schemas in their schemas")
            return
        yield from _own_faults(schema, place, self._root)
        for name in OF_SCHEMAS:
            inner = schema.get(name, {})
            if not isinstance(inner, Mapping):
                yield Fault(f"{place}.{name}", "must be an object of schemas")
                return
            for key, each in inner.items():
                yield from self._faults(each, f"{place}.{name}.{key}", depth + 1)
        for name in ONE_SCHEMA:
            if isinstance(each := schema.get(name), list) and name == "items":  # the spelling of earlier drafts
                yield from self._all_faults(each, f"{place}.items", depth)
            elif name in schema:
                yield from self._faults(each, f"{place}.{name}", depth + 1)
        for name in LIST_OF_SCHEMAS:
            if name in schema:
                yield from self._all_faults(schema[name], f"{place}.{name}", depth)

    def _all_faults(self, schemas: object, place: str, depth: int) -> Iterator[Fault]:
        if not isinstance(schemas, list) or not schemas:
            yield Fault(place, "must be a list of schemas with at least one")
            return
        for index, each in enumerate(schemas):
            yield from self._faults(each, f"{place}.{index}", depth + 1)


def _own_faults(schema: Mapping[str, Any], place: str, root: Mapping[str, Any]) -> Iterator[Fault]:
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in TYPES:
            yield Fault(f"{place}.type", f"{kind!r:.60} is not a type; the types are {', '.join(TYPES)}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        yield Fault(f"{place}.required", "must be a list of names")
    if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
        yield Fault(f"{place}.enum", "must be a list with at least one value")
    for name in NUMBERS:
        if name in schema and not _is_number(schema[name]):
            yield Fault(f"{place}.{name}", "must be a number")
    for name in COUNTS:
        if name in schema and (not isinstance(schema[name], int) or isinstance(schema[name], bool) or schema[name] < 0):
            yield Fault(f"{place}.{name}", "must be a whole number of at least 0")
    for name in TEXTS:
        if name in schema and not isinstance(schema[name], str):
            yield Fault(f"{place}.{name}", "must be text")
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#") and not _refers(root, reference[1:]):
        yield Fault(f"{place}.$ref", f"{reference!r:.60} refers to nothing in the schema")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refers(value: Any, pointer: str) -> bool:
    """Whether a JSON pointer, or the name of an anchor, leads anywhere."""
    if pointer and not pointer.startswith("/"):
        return True
    for part in pointer.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            return False
    return True
