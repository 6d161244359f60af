"""Tools in words of our own, for chat templates that know none.

The tools are described in the system message. Earlier calls and their results become the text of messages. A template
that reads `tools` gets them as they are, and one that reads `tool_calls` gets those.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gapless.text.tools.base import Tool, ToolFormat, reads

INTRODUCTION = "You can call these tools. Each line describes one of them:"
HOW = "To call a tool, reply with nothing but this, and with the arguments that its parameters ask for:"
SEVERAL = "To call several tools, write one call after the other."


def told_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], format: ToolFormat, template: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and further values for the template, by which the model learns of the tools and of earlier calls."""
    talk = [dict(message) for message in messages]
    if not reads(template, "tool_calls"):
        talk = _spelled(talk, format)
    if not tools:
        return talk, {}
    if reads(template, "tools"):
        return talk, {"tools": [tool.described() for tool in tools]}
    return _with_system(talk, describe(tools, format)), {}


def describe(tools: Sequence[Tool], format: ToolFormat) -> str:
    """The part of the system message that tells of the tools."""
    lines = [json.dumps(tool.described()["function"], ensure_ascii=False) for tool in tools]
    return "\n".join([INTRODUCTION, *lines, HOW, _call(format, "NAME", {}), SEVERAL])


def _call(format: ToolFormat, name: str, arguments: Mapping[str, Any]) -> str:
    frame = format.frame(name)
    pieces = (*frame.opens, *frame.before, format.spelled(arguments), *frame.after, *frame.closes)
    return "".join(pieces)


def _with_system(talk: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if not talk or talk[0].get("role") != "system":
        return [{"role": "system", "content": text}, *talk]
    content = talk[0].get("content")
    before: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    return [talk[0] | {"content": [*before, {"type": "text", "text": f"\n{text}"}]}, *talk[1:]]


def _spelled(talk: list[dict[str, Any]], format: ToolFormat) -> list[dict[str, Any]]:
    """Calls and results as text. Results in a row are one message, because many templates want roles to alternate."""
    spelled: list[dict[str, Any]] = []
    for message in talk:
        calls, is_result = message.pop("tool_calls", None), message["role"] == "tool"
        if calls:
            texts = [_call(format, call["function"]["name"], call["function"]["arguments"]) for call in calls]
            message["content"] = [*_parts(message.get("content")), *_parts("\n".join(texts))]
        elif is_result:
            head = f"Result of {message.get('name')}:"
            message = {"role": "user", "content": [*_parts(head), *_parts(message["content"])], "is_result": True}
        if is_result and spelled and spelled[-1].get("is_result"):
            spelled[-1]["content"] += message["content"]
        else:
            spelled.append(message)
    return [{name: value for name, value in message.items() if name != "is_result"} for message in spelled]


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
