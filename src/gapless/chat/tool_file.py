"""Tools that a conversation may use, from a file: a JSON list of OpenAI's tools, or of their functions alone."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from gapless.errors import InvalidRequest
from gapless.text.tools.base import Tool
from gapless.text.tools.schema import SchemaChecker

MAX_FILE_BYTES = 2**24
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
FIELDS = {"name": str, "description": str, "parameters": dict, "strict": bool}


def read_tools(path: str) -> tuple[Tool, ...]:
    """The tools of a file. Raises InvalidRequest."""
    try:
        if os.path.exists(path) and (not os.path.isfile(path) or os.path.getsize(path) > MAX_FILE_BYTES):
            raise InvalidRequest(f"{path}: is not a file of at most {MAX_FILE_BYTES >> 20} MiB")
        with open(path, encoding="utf-8-sig") as file:
            found = json.load(file)
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise InvalidRequest(f"{path}: nested too deeply") from None
    except InvalidRequest:
        raise
    except ValueError as error:
        raise InvalidRequest(f"{path}: not JSON: {error}") from None
    if not isinstance(found, list) or not found:
        raise InvalidRequest(f"{path}: must be a list of tools")
    tools = tuple(_tool(tool, f"{path}: tool {number}") for number, tool in enumerate(found, start=1))
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"{path}: two tools have the same name; the names are {', '.join(names)}")
    return tools


def _tool(tool: object, where: str) -> Tool:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where} must be an object with a name and parameters")
    given = {name: value for name, value in function.items() if name != "type" and value is not None}
    for name, value in given.items():
        if name not in FIELDS or not isinstance(value, FIELDS[name]):
            raise InvalidRequest(f"{where}: {name} is wrong; a tool has {', '.join(FIELDS)}")
    if not NAME.fullmatch(given.get("name", "")):
        raise InvalidRequest(f"{where} needs a name of letters, digits, _, . and -")
    parameters: dict[str, Any] = given.get("parameters") or {"type": "object", "properties": {}}
    if (fault := SchemaChecker().check(parameters)) is not None:
        raise InvalidRequest(f"{where}: parameters{fault.place}: {fault.reason}")
    return Tool(given["name"], parameters, given.get("description"), given.get("strict", False))
