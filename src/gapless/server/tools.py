"""Tools as clients define them, checked: names, schemas, and which of them may or must be called.

Reads the two spellings of the OpenAI API, of chats and of responses. Everything that is wrong is refused by its path.
Knows nothing of formats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gapless.server.errors import ApiError
from gapless.text.tools.base import Tool
from gapless.text.tools.schema import SchemaChecker

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_TOOLS = 512
MAX_PLACE = 300  # characters of a path in an error: the names in it are the client's
FUNCTION_FIELDS = frozenset(("name", "description", "parameters", "strict"))
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request."""

    tools: Sequence[Tool] = ()
    mode: Mode = "none"
    only: str | None = None  # the one tool that must be called
    is_parallel: bool = True  # a reply may have several calls
    allowed: frozenset[str] | None = None  # the tools that may be called, where that is not all that are offered

    @property
    def offered(self) -> Sequence[Tool]:
        """The tools that the model is told of."""
        return () if self.mode == "none" else self.tools

    @property
    def callable(self) -> Sequence[Tool]:
        """The tools that the reply may call."""
        allowed = self.allowed
        return [t for t in self.offered if self.only in (None, t.name) and (allowed is None or t.name in allowed)]

    @property
    def needs_grammar(self) -> bool:
        """Whether text that the model might write has to be ruled out."""
        is_strict = any(tool.strict for tool in self.offered)
        is_narrow = not self.is_parallel or self.allowed is not None
        return self.mode == "required" or is_strict or (self.mode == "auto" and is_narrow)

    def finish_reason(self, reason: str | None, num_calls: int) -> str | None:
        """The reason to tell. A reply that had to call a certain tool ends as any text does."""
        return "tool_calls" if reason == "stop" and num_calls and self.only is None else reason


def chat_tools(tools: list[dict[str, Any]] | None, choice: object, is_parallel: bool | None) -> Toolbox:
    """As chats have them: `{"type": "function", "function": {"name": ...}}`. Raises ApiError."""
    schemas = SchemaChecker()
    found = [_chat_tool(each, f"tools.{index}", schemas) for index, each in enumerate(tools or ())]
    named = choice.get("function") if isinstance(choice, Mapping) and _is_function(choice) else None
    return _toolbox(found, choice, named, "tool_choice.function.name", "function.name", is_parallel)


def response_tools(tools: list[dict[str, Any]] | None, choice: object, is_parallel: bool | None) -> Toolbox:
    """As responses have them: `{"type": "function", "name": ...}`. Raises ApiError."""
    found, schemas = [], SchemaChecker()
    for index, each in enumerate(tools or ()):
        _check_kind(each, f"tools.{index}")
        function = {name: value for name, value in each.items() if name != "type"}
        found.append(_tool(function, f"tools.{index}", schemas))
    named = choice if isinstance(choice, Mapping) and _is_function(choice) else None
    return _toolbox(found, choice, named, "tool_choice.name", "name", is_parallel)


def _toolbox(
    tools: Sequence[Tool], choice: object, named: object, place: str, name_field: str, is_parallel: bool | None
) -> Toolbox:
    if len(tools) > MAX_TOOLS:
        raise ApiError(400, f"{len(tools)} tools; at most {MAX_TOOLS} are allowed", param="tools")
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            where = f"tools.{index}.{name_field}"
            raise ApiError(400, f"{where}: {name!r} is the name of an earlier tool", param=where)
    parallel = is_parallel is not False
    if named is not None:
        only = named.get("name") if isinstance(named, Mapping) else None
        if not isinstance(only, str):
            raise ApiError(400, f"{place} must be the name of a tool", param=place)
        if only not in names:
            raise ApiError(400, f"{place}: no tool is named {only!r}", param=place)
        return Toolbox(tools, "required", only, is_parallel=False)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        mode, allowed = _allowed(choice, names)
        return Toolbox(tools, mode, None, parallel, allowed)
    if choice not in (None, "none", "auto", "required"):
        message = 'tool_choice must be "none", "auto", "required", the name of a function, or allowed_tools'
        raise ApiError(400, message, param="tool_choice", code="unsupported_parameter")
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice is required, but there are no tools", param="tool_choice")
    if not tools or choice == "none":
        return Toolbox(tools, "none", None, parallel)
    return Toolbox(tools, "required" if choice == "required" else "auto", None, parallel)


def _allowed(choice: Mapping[str, Any], names: Sequence[str]) -> tuple[Mode, frozenset[str]]:
    """The mode and the names of allowed tools, as chats (nested) or responses have them."""
    place = "tool_choice.allowed_tools" if "allowed_tools" in choice else "tool_choice"
    given = choice.get("allowed_tools", choice)
    mode, listed = (given.get("mode"), given.get("tools")) if isinstance(given, Mapping) else (None, None)
    if mode != "auto" and mode != "required":
        raise ApiError(400, f'{place}.mode must be "auto" or "required"', param=f"{place}.mode")
    if not isinstance(listed, list) or not listed:
        raise ApiError(400, f"{place}.tools must be a list of tools that is not empty", param=f"{place}.tools")
    found = []
    for index, tool in enumerate(listed):
        inner = tool.get("function", tool) if isinstance(tool, Mapping) and _is_function(tool) else None
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if not isinstance(name, str) or name not in names:
            where = f"{place}.tools.{index}"
            raise ApiError(400, f"{where} must name one of the tools", param=where)
        found.append(name)
    return mode, frozenset(found)


def _is_function(choice: Mapping[str, Any]) -> bool:
    return choice.get("type") == "function"


def _chat_tool(given: dict[str, Any], where: str, schemas: SchemaChecker) -> Tool:
    _check_kind(given, where)
    _check_fields(given, frozenset(("type", "function")), where)
    function = given.get("function")
    if not isinstance(function, dict):
        raise ApiError(400, f"{where}.function must be an object", param=f"{where}.function")
    return _tool(function, f"{where}.function", schemas)


def _tool(function: Mapping[str, Any], where: str, schemas: SchemaChecker) -> Tool:
    _check_fields(function, FUNCTION_FIELDS, where)
    name, description, strict = (function.get(field) for field in ("name", "description", "strict"))
    if not isinstance(name, str) or not NAME.fullmatch(name):
        place = f"{where}.name"
        raise ApiError(400, f"{place} must have 1 to 64 letters, digits, '_', '-' or '.'", param=place)
    if not isinstance(description, str | None):
        raise ApiError(400, f"{where}.description must be text", param=f"{where}.description")
    if not isinstance(strict, bool | None):
        raise ApiError(400, f"{where}.strict must be true or false", param=f"{where}.strict")
    parameters = function.get("parameters")
    schema = NO_PARAMETERS if parameters in (None, {}) else parameters
    place = f"{where}.parameters"
    if (fault := schemas.check(schema)) is not None:
        param = f"{place}{fault.place}"[:MAX_PLACE]
        raise ApiError(400, f"{param}: {fault.reason}", param=param, code="invalid_schema")
    assert isinstance(schema, Mapping)
    return Tool(name, schema, description, bool(strict))


def _check_kind(given: Mapping[str, Any], where: str) -> None:
    if given.get("type") != "function":
        message = f"{where}.type is {given.get('type')!r}; only tools of type 'function' are supported"
        raise ApiError(400, message, param=f"{where}.type", code="unsupported_parameter")


def _check_fields(given: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    for name, value in given.items():
        if name not in known and value is not None:
            place = f"{where}.{name}"
            raise ApiError(400, f"{place} is not a field of a tool", param=place, code="unknown_parameter")
