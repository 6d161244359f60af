"""Schemas of every sort that structured output supports, most of them with an end in sight for a random text."""

from __future__ import annotations

from typing import Any

Schema = Any
SHORT = {"type": "string", "maxLength": 6}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def record(*, closed: bool = True, required: list[str] | None = None, **properties: Schema) -> Schema:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names} | (
        {"additionalProperties": False} if closed else {}
    )


def listed(items: Schema, most: int = 3, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


SCHEMAS: dict[str, Schema] = {
    # scalars
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "digit": DIGIT,
    "negative": {"type": "integer", "minimum": -50, "maximum": -3},
    "exclusive": {"type": "integer", "exclusiveMinimum": 4, "exclusiveMaximum": 6},
    "fraction": {"type": "number", "minimum": 0.25, "maximum": 0.5},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 7},
    "two types": {"type": ["integer", "null"], "minimum": 1, "maximum": 99},
    "short text": SHORT,
    "exact text": {"type": "string", "minLength": 4, "maxLength": 4},
    "const": {"const": {"a": [1, "é", None]}},
    "enum": {"enum": ["red", "green", 3, None, False, {"deep": [1]}]},
    "unicode enum": {"enum": ["žluťoučký", "日本語", "🙂🙃", "Ω≈ç", "\u200d", "naïve"]},
    "escapes": {"enum": ['"quoted"', "back\\slash", "tab\t", "line\nbreak", "/", "\x01"]},
    # patterns and formats
    "pattern": {"type": "string", "pattern": "^[a-c]{2,5}$"},
    "phone": {"type": "string", "pattern": r"^\+[0-9]{2}-[0-9]{3}$"},
    "unanchored": {"type": "string", "pattern": "xy", "maxLength": 6},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date and time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    # arrays
    "digits": listed(DIGIT),
    "at least two": listed({"type": "boolean"}, least=2),
    "empty array": listed(SHORT, most=0),
    "tuple": {"type": "array", "prefixItems": [DIGIT, {"type": "boolean"}, SHORT], "items": False, "minItems": 3},
    "tuple and more": {"type": "array", "prefixItems": [SHORT], "items": DIGIT, "minItems": 1, "maxItems": 4},
    "matrix": listed(listed(DIGIT, most=2, least=2), most=2, least=1),
    "array of records": listed(record(id=DIGIT, ok={"type": "boolean"})),
    # objects
    "record": record(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "optional": record(a=DIGIT, b=SHORT, c={"type": "null"}, required=["b"]),
    "nothing required": record(x=DIGIT, y=DIGIT, required=[]),
    "nested": record(a=record(b=record(c=record(d=DIGIT)))),
    "wide": record(**{f"p{i}": DIGIT for i in range(12)}),
    "names": record(**{"with space": DIGIT, "ünï": DIGIT, 'q"uote': DIGIT, "$ref": DIGIT, "": DIGIT}),
    "map": {"type": "object", "additionalProperties": DIGIT, "maxProperties": 2},
    "at least two properties": {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "minProperties": 2,
        "maxProperties": 3,
    },
    "open": {"type": "object", "properties": {"a": DIGIT}, "required": ["a"], "maxProperties": 2},
    "open with types": {**record(a=DIGIT), "additionalProperties": {"type": "null"}, "maxProperties": 3},
    "by pattern": {
        "type": "object",
        "patternProperties": {"^n_[a-c]$": DIGIT, "^s_[a-c]$": SHORT},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    # unions and intersections
    "any of": {"anyOf": [DIGIT, SHORT, {"type": "null"}]},
    "any of records": {"anyOf": [record(circle=DIGIT), record(square=record(side=DIGIT))]},
    "one of": {"oneOf": [record(kind={"const": "a"}, x=DIGIT), record(kind={"const": "b"}, y=SHORT)]},
    "nullable record": {"anyOf": [record(v=DIGIT), {"type": "null"}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    "all of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]},
            {"type": "object", "properties": {"b": DIGIT}, "required": ["b"]},
        ],
        "maxProperties": 2,
    },
    "lists of unions": listed({"anyOf": [DIGIT, {"type": "boolean"}, listed(DIGIT, most=2)]}),
    # references and recursion
    "reference": {"$defs": {"d": DIGIT}, **record(a={"$ref": "#/$defs/d"}, b={"$ref": "#/$defs/d"})},
    "definitions": {"definitions": {"s": SHORT}, "type": "array", "items": {"$ref": "#/definitions/s"}, "maxItems": 2},
    "chained": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": listed(DIGIT)}, "$ref": "#/$defs/a"},
    "tree": {
        "$defs": {"node": record(v=DIGIT, kids=listed({"$ref": "#/$defs/node"}, most=2))},
        "$ref": "#/$defs/node",
    },
    "linked list": {
        "$defs": {"link": {"anyOf": [{"type": "null"}, record(next={"$ref": "#/$defs/link"})]}},
        "$ref": "#/$defs/link",
    },
    "expression": {
        "$defs": {
            "e": {
                "anyOf": [DIGIT, record(op={"enum": ["+", "*"]}, args=listed({"$ref": "#/$defs/e"}, most=2, least=2))]
            }
        },
        "$ref": "#/$defs/e",
    },
    # from real uses
    "tool call": record(
        name={"enum": ["search", "open"]}, arguments=record(query=SHORT, limit=DIGIT, required=["query"])
    ),
    "sentiment": record(label={"enum": ["positive", "negative"]}, score={"type": "number", "minimum": 0, "maximum": 1}),
    "invoice": record(
        id={"type": "string", "pattern": "^INV-[0-9]{4}$"},
        lines=listed(record(item=SHORT, price={"type": "number", "minimum": 0, "maximum": 99}), most=2),
        paid={"type": "boolean"},
    ),
    "any object": {"type": "object"},
    "anything": True,
}
