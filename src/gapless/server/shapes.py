"""The shape that a body asks its text to have, in every spelling that clients use.

OpenAI's `response_format` and, in responses, `text.format`; vLLM's `structured_outputs` and its older `guided_*`. Each
becomes one value of core/structured.py, whose errors name the parameter as the client spelled it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapless.core.structured import Structured, read_structured
from gapless.errors import InvalidRequest
from gapless.server.protocol import Sampling

GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
SCHEMA_FIELDS = ("name", "description", "schema", "strict")


def shape_of(body: Sampling) -> Structured | None:
    """None for free text. Raises InvalidRequest."""
    found = [
        _read_format(getattr(body, "response_format", None), "response_format"),
        _read_format(_format_of_text(getattr(body, "text", None)), "text.format", is_flat=True),
        None if body.structured_outputs is None else read_structured(body.structured_outputs, "structured_outputs"),
    ]
    for name, kind in GUIDED.items():
        if (given := getattr(body, name)) is not None:
            found.append(read_structured({kind: given, **_guided_whitespace(body, kind)}, name, name))
    shapes = [shape for shape in found if shape is not None]
    if len(shapes) > 1:
        first, second = shapes[:2]
        raise InvalidRequest(f"{first.param} and {second.param} both ask for a shape; send one", second.param)
    if not shapes and body.guided_whitespace_pattern is not None:
        raise InvalidRequest("guided_whitespace_pattern needs guided_json", "guided_whitespace_pattern")
    return shapes[0] if shapes else None


def _format_of_text(text: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if text is None:
        return None
    _refuse_others(text, ("format",), "text")
    found = text.get("format")
    if not isinstance(found, Mapping | None):
        raise InvalidRequest(f"text.format must be an object, got {found!r:.60}", "text.format")
    return found


def _guided_whitespace(body: Sampling, kind: str) -> dict[str, str]:
    pattern = body.guided_whitespace_pattern
    if pattern is None:
        return {}
    if kind != "json_schema":
        raise InvalidRequest("guided_whitespace_pattern needs guided_json", "guided_whitespace_pattern")
    return {"whitespace_pattern": pattern}


def _read_format(value: Mapping[str, Any] | None, param: str, *, is_flat: bool = False) -> Structured | None:
    """A format of OpenAI. is_flat: the schema stands beside the type, as in responses."""
    if value is None:
        return None
    match value.get("type"):
        case "text":
            _refuse_others(value, ("type",), param)
            return None
        case "json_object":
            _refuse_others(value, ("type",), param)
            return read_structured({"json_object": True}, param)
        case "json_schema":
            return _read_schema(value, param, is_flat=is_flat)
        case "structural_tag" if not is_flat:
            return read_structured({"structural_tag": dict(value)}, param, param)
        case kind:
            known = "text, json_object, json_schema" + ("" if is_flat else ", structural_tag")
            raise InvalidRequest(f"{param}.type must be one of {known}, got {kind!r:.60}", param)


def _read_schema(value: Mapping[str, Any], param: str, *, is_flat: bool) -> Structured:
    """Strict or not, the schema is enforced; a keyword that cannot be is refused."""
    inner, place = (value, param) if is_flat else (value.get("json_schema"), f"{param}.json_schema")
    if not isinstance(inner, Mapping):
        raise InvalidRequest(f"{place} must be an object with a schema", param)
    _refuse_others(value, ("type", *SCHEMA_FIELDS) if is_flat else ("type", "json_schema"), param)
    if not is_flat:
        _refuse_others(inner, SCHEMA_FIELDS, place)
    if not isinstance(inner.get("strict"), bool | None):
        raise InvalidRequest(f"{place}.strict must be true or false", param)
    for name in ("name", "description"):
        if not isinstance(inner.get(name), str | None):
            raise InvalidRequest(f"{place}.{name} must be text", param)
    schema = inner.get("schema")
    if schema is None:
        return read_structured({"json_object": True}, param)
    return read_structured({"json_schema": schema}, param, f"{place}.schema")


def _refuse_others(value: Mapping[str, Any], known: tuple[str, ...], place: str) -> None:
    for name, given in value.items():
        if name not in known and given is not None:
            raise InvalidRequest(f"{place} has {name!r:.60}, which is not known there", place.partition(".")[0])
