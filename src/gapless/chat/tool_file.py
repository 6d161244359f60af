"""Tools that a conversation may use, from a file: a JSON list of OpenAI's tools, or of their functions alone."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from gapless.errors import InvalidRequest

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
ToolList = Sequence[dict[str, Any]]


def read_tools(path: str) -> ToolList:
    """The tools of a file, as the API has them. Raises InvalidRequest."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            found = json.load(file)
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path}: not JSON: {error}") from None
    if not isinstance(found, list) or not found:
        raise InvalidRequest(f"{path}: must be a list of tools")
    tools = [_tool(tool, f"{path}: tool {number}") for number, tool in enumerate(found, start=1)]
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"{path}: two tools have the same name; the names are {', '.join(names)}")
    return tools


def _tool(tool: object, where: str) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(f"{where} needs a name of letters, digits, _, . and -")
    if not isinstance(function.get("parameters", {}), dict):
        raise InvalidRequest(f"{where}: parameters must be a JSON schema, which is an object")
    return {"type": "function", "function": {key: value for key, value in function.items() if key != "type"}}
