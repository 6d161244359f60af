"""The value of structured output: exactly one kind, within limits, and errors that name the field."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gapless.core.structured import (
    MAX_BRACKETS,
    MAX_DEPTH,
    MAX_GRAMMAR_BYTES,
    MAX_NODES,
    MAX_REGEX_BYTES,
    MAX_STRING_BYTES,
    Structured,
    read_structured,
)
from gapless.errors import InvalidRequest


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"regex": "[0-9]+"}, Structured("regex", "[0-9]+")),
        ({"json": {"type": "object"}}, Structured("json_schema", '{"type":"object"}')),
        ({"json_schema": '{"b": 1, "a": "é"}'}, Structured("json_schema", '{"b":1,"a":"é"}')),
        ({"json_schema": True}, Structured("json_schema", "{}")),
        ({"json_object": True}, Structured("json_object")),
        ({"json_object": True, "json": None, "regex": None}, Structured("json_object")),
        ({"choice": ["b", "a", "b"]}, Structured("choice", '["b","a"]')),
        ({"grammar": 'start: "a"'}, Structured("grammar", 'start: "a"')),
        ({"structural_tag": {"format": {}}}, Structured("structural_tag", '{"format":{}}')),
        ({"json": {}, "disable_any_whitespace": True}, Structured("json_schema", "{}", "")),
        ({"json": {}, "disable_any_whitespace": False}, Structured("json_schema", "{}")),
        ({"json": {}, "whitespace_pattern": " *"}, Structured("json_schema", "{}", " *")),
        (Structured("regex", "a"), Structured("regex", "a")),
    ],
)
def test_one_kind(given: Any, expected: Structured) -> None:
    assert read_structured(given) == expected


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("regex", "must be an object"),
        ({}, "needs exactly one of"),
        ({"regex": "a", "choice": ["a"]}, "got regex, choice"),
        ({"regexp": "a"}, "unknown kind 'regexp'"),
        ({"regex": "a", "disable_fallback": True}, "disable_fallback is not supported"),
        ({"regex": "a", "disable_any_whitespace": True}, "belong to JSON"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "exclude each other"),
        ({"json_object": "yes"}, "must be true"),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": "[" * 100_000}, "not JSON"),
        ({"json_schema": [1]}, "must be an object"),
        ({"json_schema": "false"}, "must be an object"),
        ({"json_schema": {"const": float("nan")}}, "not JSON"),
        ({"json_schema": {"const": {1}}}, "not JSON"),
        ({"json_schema": {1: 2}}, "not text"),
        ({"json_schema": {"const": "\ud800"}}, "lone surrogate"),
        ({"json_schema": nested(MAX_DEPTH)}, f"nested more than {MAX_DEPTH} deep"),
        ({"json_schema": {"enum": list(range(MAX_NODES))}}, f"more than {MAX_NODES} values"),
        ({"json_schema": {"enum": [f"value-{i}" for i in range(200_000)]}}, f"more than {MAX_NODES} values"),
        ({"json_schema": {"const": "a" * (MAX_STRING_BYTES + 1)}}, f"at most {MAX_STRING_BYTES}"),
        ({"json_schema": {"a" * (MAX_STRING_BYTES + 1): 1}}, f"at most {MAX_STRING_BYTES}"),
        ({"regex": ""}, "not empty"),
        ({"regex": 5}, "must be text"),
        ({"regex": "\udcff"}, "lone surrogate"),
        ({"regex": "a" * (MAX_REGEX_BYTES + 1)}, f"at most {MAX_REGEX_BYTES}"),
        ({"regex": "(" * 5000 + ")" * 5000}, f"at most {MAX_BRACKETS}"),
        ({"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000}, f"at most {MAX_BRACKETS}"),
        ({"grammar": "a" * (MAX_GRAMMAR_BYTES + 1)}, f"at most {MAX_GRAMMAR_BYTES}"),
        ({"choice": []}, "not empty"),
        ({"choice": "ab"}, "must be a list"),
        ({"choice": ["a", ""]}, "not empty"),
        ({"choice": ["a", 1]}, "not empty"),
        ({"structural_tag": [1]}, "must be an object"),
    ],
)
def test_anything_else_is_refused_with_the_reason(given: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(reason)) as caught:
        read_structured(given, "guided")
    assert caught.value.param == "guided"
    assert str(caught.value).startswith("guided")
    assert len(str(caught.value)) < 400


def test_a_value_that_contains_itself_is_too_deep() -> None:
    value: dict[str, Any] = {}
    value["items"] = value
    with pytest.raises(InvalidRequest, match="nested more than"):
        read_structured({"json_schema": value})


def test_the_order_of_properties_is_kept() -> None:
    schema = {"properties": {"z": {}, "a": {}}, "type": "object"}
    assert list(json.loads(read_structured({"json": schema}).text)["properties"]) == ["z", "a"]


def test_escaped_brackets_do_not_nest() -> None:
    assert read_structured({"regex": r"\(\[\{" * 300}).kind == "regex"
