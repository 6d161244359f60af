"""Messages as clients send them, checked: chats, and the input of responses.

One rule for messages and their parts of text: a field that nobody would read is refused by its path, unless it is null
or empty, or known to change nothing. Knows wire types and the template's text, not how it is rendered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gapless.server.errors import ApiError
from gapless.server.history import CallIds, read_arguments, read_message, read_name, told_call
from gapless.server.protocol import MessageBody
from gapless.text.tools.base import reads

# Fields that label a client's own records.
LABELS = frozenset(("name", "cache_control", "annotations"))
CALL_FIELDS = frozenset(("tool_calls", "tool_call_id"))
REASONING_FIELDS = frozenset(("reasoning", "reasoning_content"))  # of earlier turns: templates may leave them out
TEXT_KINDS = ("input_text", "output_text", "text")
PART_FIELDS = LABELS | {"type", "text", "logprobs"}
ITEM_FIELDS = LABELS | {"type", "role", "content", "id", "status"}
CALL_ITEM_FIELDS = frozenset(("type", "id", "call_id", "name", "arguments", "status"))
RESULT_ITEM_FIELDS = frozenset(("type", "id", "call_id", "output", "status"))
REASONING_ITEM_FIELDS = frozenset(("type", "id", "summary", "content", "status"))
Talk = list[dict[str, Any]]


def chat_talk(messages: Sequence[MessageBody], template: str) -> Talk:
    """Messages as the template expects them. `developer` is a newer name of `system`. Raises ApiError."""
    ids, talk = CallIds(), Talk()
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        _check_message(message, where, template)
        given = {name: value for name, value in message if name in message.model_fields_set}
        role = "system" if message.role == "developer" else message.role
        talk.append(read_message(given | {"role": role}, ids, where))
    return talk


def _check_message(message: MessageBody, where: str, template: str) -> None:
    """Raise ApiError for a field of a chat message, or of its parts, that the template does not read."""
    extra = message.model_extra or {}
    known = LABELS | CALL_FIELDS | REASONING_FIELDS
    read = [name for name in extra if name not in known and reads(template, name)]
    _check_fields(extra, where, known.union(read), "the model's chat template does not use it")
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


def turns(given: str | list[dict[str, Any]], earlier: Talk) -> Talk:
    """The input of a response as messages; `earlier` is what was said before. Raises ApiError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise ApiError(400, "input is empty; it needs at least one message", param="input")
    items = ItemReader(earlier)
    for index, item in enumerate(given):
        items.add(item, f"input.{index}")
    return items.talk


class ItemReader:
    """Items of a response's input to messages: reasoning, text and calls of one turn are one message."""

    def __init__(self, earlier: Talk) -> None:
        self.talk: Talk = []
        self._reasoning = ""
        self._ids = CallIds()
        self._ids.recall(earlier)

    def add(self, item: dict[str, Any], where: str) -> None:
        """Raises ApiError."""
        match item.get("type") or "message":
            case "message":
                self._add_message(item, where)
            case "function_call":
                self._add_call(item, where)
            case "function_call_output":
                self._add_result(item, where)
            case "reasoning":
                _check_fields(item, where, REASONING_ITEM_FIELDS, "responses do not use it")
                if item.get("content"):
                    self._reasoning += _content(f"{where}.content", item["content"], ("reasoning_text",))
            case kind:
                message = f"{where} is of type {kind!r}, which is not supported"
                raise ApiError(400, message, param="input", code="unsupported_parameter")

    def _add_message(self, item: dict[str, Any], where: str) -> None:
        if not isinstance(item.get("role"), str):
            raise ApiError(400, f"{where} must be a message with a role", param="input")
        _check_fields(item, where, ITEM_FIELDS, "responses do not use it")
        role = "system" if item["role"] == "developer" else item["role"]
        message = {"role": role, "content": _content(f"{where}.content", item.get("content"))}
        self.talk.append(message | (self._take_reasoning() if role == "assistant" else {}))

    def _add_call(self, item: dict[str, Any], where: str) -> None:
        _check_fields(item, where, CALL_ITEM_FIELDS, "responses do not use it")
        name = read_name(item.get("name"), f"{where}.name")
        id = self._ids.call(item.get("call_id"), name, f"{where}.call_id")
        call = told_call(id, name, read_arguments(item.get("arguments"), f"{where}.arguments"))
        if not self.talk or self.talk[-1]["role"] != "assistant" or self._reasoning:
            self.talk.append({"role": "assistant", "content": ""} | self._take_reasoning())
        self.talk[-1].setdefault("tool_calls", []).append(call)

    def _add_result(self, item: dict[str, Any], where: str) -> None:
        _check_fields(item, where, RESULT_ITEM_FIELDS, "responses do not use it")
        name = self._ids.result(item.get("call_id"), f"{where}.call_id")
        output = _content(f"{where}.output", item.get("output"))
        self.talk.append({"role": "tool", "tool_call_id": item["call_id"], "name": name, "content": output})

    def _take_reasoning(self) -> dict[str, str]:
        taken, self._reasoning = self._reasoning, ""
        return {"reasoning_content": taken} if taken else {}


def _content(where: str, content: object, kinds: Sequence[str] = TEXT_KINDS) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be text or a list of text parts", param="input")
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
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
