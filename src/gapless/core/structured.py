"""What shape a text must have: a JSON schema, any JSON object, a regex, a choice, a grammar, or structural tags.

A value with exactly one kind. Untrusted input is read, measured and written out as one text here, before the queue, so
that code which recurses never meets a deep value. Knows no tokenizer; guides/ turns the value into masks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gapless.errors import InvalidRequest

MAX_SCHEMA_BYTES = 512 * 2**10  # of a JSON schema, of all choices together, or of structural tags
MAX_REGEX_BYTES = 16 * 2**10  # the time to compile some regexes grows with the square of their length
MAX_GRAMMAR_BYTES = 128 * 2**10
MAX_DEPTH = 64  # values inside values, of a schema
MAX_BRACKETS = 200  # brackets inside brackets, of a regex or a grammar
MAX_NODES = 50_000  # values of a schema, entries of an enum included
MAX_STRING_BYTES = 8 * 2**10  # of one name, constant or choice: a forced text is tokenized at every token

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
ALIASES = {"json": "json_schema"}  # vLLM's name
WHITESPACE = ("disable_any_whitespace", "whitespace_pattern")
IGNORED = ("disable_fallback", "disable_additional_properties")  # of vLLM; false asks for nothing


@dataclass(frozen=True, slots=True)
class Structured:
    """One kind, and its text: JSON for schemas, choices and tags, the source of a regex or a grammar."""

    kind: str
    text: str = ""
    whitespace: str | None = None  # a regex for the space between JSON values; "" allows none; None: a little
    param: str = "structured"  # the name that the client gave it, for errors

    def refuse(self, reason: str) -> InvalidRequest:
        """An error that names the parameter, the kind and the reason."""
        shown = reason if len(reason) <= 500 else reason[:497] + "..."
        return InvalidRequest(f"{self.param}: this {self.kind} cannot be used: {shown}", self.param)


def read_structured(value: object, param: str = "structured", place: str | None = None) -> Structured:
    """From a mapping of one kind to what it needs: {"regex": "[0-9]+"}. Raises InvalidRequest.

    place: where the client wrote the content of the kind, for errors, if that is not the kind's name below param.
    """
    if isinstance(value, Structured):
        return value
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{param} must be an object such as {{'regex': ...}}, got {_shown(value)}", param)
    given = {str(ALIASES.get(k, k)): part for k, part in value.items() if part is not None and part is not False}
    whitespace = _whitespace({name: given.pop(name) for name in WHITESPACE if name in given}, param)
    for name in given:
        if name in IGNORED:
            raise InvalidRequest(f"{param}: {name} is not supported", param)
        if name not in KINDS:
            raise InvalidRequest(f"{param}: unknown kind {_shown(name)}; known: {', '.join(KINDS)}", param)
    if len(given) != 1:
        found = ", ".join(given) or "none"
        raise InvalidRequest(f"{param} needs exactly one of {', '.join(KINDS)}; got {found}", param)
    ((kind, content),) = given.items()
    if whitespace is not None and kind not in ("json_schema", "json_object"):
        raise InvalidRequest(f"{param}: whitespace options belong to JSON, not to {kind}", param)
    spelled = next(str(name) for name in value if ALIASES.get(name, name) == kind and value[name] is content)
    return Structured(kind, _READERS[kind](content, place or f"{param}.{spelled}", param), whitespace, param)


def _whitespace(given: Mapping[str, Any], param: str) -> str | None:
    if len(given) > 1:
        raise InvalidRequest(f"{param}: disable_any_whitespace and whitespace_pattern exclude each other", param)
    if given.get("disable_any_whitespace", True) is not True:
        raise InvalidRequest(f"{param}: disable_any_whitespace must be true or false", param)
    pattern = given.get("whitespace_pattern")
    if "disable_any_whitespace" in given or pattern == "":
        return ""
    return None if pattern is None else _regex(pattern, f"{param}: whitespace_pattern", param)


# -- one reader a kind: (what was given, its name in errors, the parameter) -> text --------------------------------


def _schema(value: Any, name: str, param: str) -> str:
    """A schema as an object, or as its JSON text. True is the schema of everything."""
    schema = _parsed(value, name, param) if isinstance(value, str) else value
    return _dump({} if schema is True else schema, name, param, dict)


def _json_object(value: Any, name: str, param: str) -> str:
    if value not in (True, {}):
        raise InvalidRequest(f"{name} must be true, got {_shown(value)}", param)
    return ""


def _regex(value: Any, name: str, param: str) -> str:
    return _source(value, name, param, MAX_REGEX_BYTES)


def _grammar(value: Any, name: str, param: str) -> str:
    return _source(value, name, param, MAX_GRAMMAR_BYTES)


def _choice(value: Any, name: str, param: str) -> str:
    if not isinstance(value, (list, tuple)) or not value:
        raise InvalidRequest(f"{name} must be a list of texts that is not empty, got {_shown(value)}", param)
    for item in value:
        if not isinstance(item, str) or not item:
            raise InvalidRequest(f"{name} must have texts that are not empty, got {_shown(item)}", param)
    return _dump(list(dict.fromkeys(value)), name, param, list)


def _tags(value: Any, name: str, param: str) -> str:
    return _dump(_parsed(value, name, param) if isinstance(value, str) else value, name, param, dict)


_READERS = {
    "json_schema": _schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _tags,
}


# -- limits ------------------------------------------------------------------------------------------------------------


def _source(text: Any, name: str, param: str, most: int) -> str:
    """The source of a regex or a grammar, neither too long nor too deep. A space alone is a regex."""
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"{name} must be text that is not empty, got {_shown(text)}", param)
    _check_size(text, name, param, most)
    depth = deepest = 0
    for char in text.replace("\\\\", "").replace("\\(", "").replace("\\[", "").replace("\\{", ""):
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(depth - 1, 0)
    if deepest > MAX_BRACKETS:
        raise InvalidRequest(f"{name} has brackets {deepest} deep; at most {MAX_BRACKETS}", param)
    return text


def _parsed(text: str, name: str, param: str) -> Any:
    _check_size(text, name, param, MAX_SCHEMA_BYTES)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not JSON: {error}", param) from None


def _dump(value: Any, name: str, param: str, kind: type) -> str:
    """A value as JSON, in the order in which it was given: properties come in that order in the text."""
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name} must be an object, got {_shown(value)}", param)
    _measure(value, name, param)
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} is not JSON: {error}", param) from None
    _check_size(text, name, param, MAX_SCHEMA_BYTES)
    return text


def _measure(value: Any, name: str, param: str) -> None:
    """Raise for a value with too many parts, too deep a part or too long a string. Does not recurse."""
    num_nodes, level, depth = 0, [value], 0
    while level:
        depth += 1
        num_nodes += len(level)
        if num_nodes > MAX_NODES:
            raise InvalidRequest(f"{name} has more than {MAX_NODES} values", param)
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{name} is nested more than {MAX_DEPTH} deep", param)
        below: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                for key in item:
                    _check_string(key, name, param)
                below.extend(item.values())
            elif isinstance(item, (list, tuple)):
                below.extend(item)
            elif isinstance(item, str):
                _check_string(item, name, param)
        level = below


def _check_string(text: object, name: str, param: str) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} has the name {_shown(text)}, which is not text", param)
    if len(text) > MAX_STRING_BYTES // 4:
        _check_size(text, f"{name}: the string {_shown(text)}", param, MAX_STRING_BYTES)


def _check_size(text: str, name: str, param: str, most: int) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} is not valid Unicode: it has a lone surrogate", param) from None
    if size > most:
        raise InvalidRequest(f"{name} has {size} bytes; at most {most}", param)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."
