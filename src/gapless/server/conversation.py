"""Messages as clients send them, checked: chats, and the input of responses.

One rule for messages and their parts of text: a field that nobody would read is refused by its path, unless it is null
or empty, or known to change nothing. Knows wire types and the template's text, not how it is rendered.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gapless.server.errors import ApiError
from gapless.server.protocol import MessageBody

# Fields that label a client's own records.
LABELS = frozenset(("name", "cache_control", "annotations"))
TEXT_KINDS = ("input_text", "output_text", "text")
PART_FIELDS = LABELS | {"type", "text", "logprobs"}
ITEM_FIELDS = LABELS | {"type", "role", "content", "id", "status"}
Talk = list[dict[str, Any]]


def check_message(message: MessageBody, where: str, template: str) -> None:
    """Raise ApiError for a field of a chat message, or of its parts, that the template does not read."""
    extra = message.model_extra or {}
    read = [name for name in extra if re.search(rf"\b{re.escape(name)}\b", template)]
    _check_fields(extra, where, LABELS.union(read), "the model's chat template does not use it")
    for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
        _check_part(part, f"{where}.content.{index}")


def last_words(messages: Sequence[MessageBody]) -> str:
    """The text of the last message, if it is the assistant's."""
    message = messages[-1]
    if message.role != "assistant" or message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(str(part.get("text", "")) for part in message.content)


def turns(given: str | list[dict[str, Any]]) -> Talk:
    """The input of a response as messages. Raises ApiError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise ApiError(400, "input is empty; it needs at least one message", param="input")
    return [_turn(f"input.{index}", item) for index, item in enumerate(given)]


def _turn(where: str, item: dict[str, Any]) -> dict[str, Any]:
    if (item.get("type") or "message") != "message" or not isinstance(item.get("role"), str):
        raise ApiError(400, f"{where} must be a message with a role; other items are not supported", param="input")
    _check_fields(item, where, ITEM_FIELDS, "responses do not use it")
    role = "system" if item["role"] == "developer" else item["role"]
    return {"role": role, "content": _content(f"{where}.content", item.get("content"))}


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be text or a list of text parts", param="input")
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in TEXT_KINDS or not isinstance(part.get("text"), str):
            raise ApiError(400, f"{where} may only have parts of text", param="input")
        _check_part(part, f"{where}.{index}")
    return "\n".join(part["text"] for part in content)


def _check_part(part: Mapping[str, Any], where: str) -> None:
    if part.get("type") in TEXT_KINDS:
        _check_fields(part, where, PART_FIELDS, "a part of text does not have it")


def _check_fields(given: Mapping[str, Any], where: str, known: Collection[str], reason: str) -> None:
    for name, value in given.items():
        if value and name not in known:
            place = f"{where}.{name}"
            raise ApiError(400, f"{place} is not supported: {reason}", param=place, code="unsupported_parameter")
