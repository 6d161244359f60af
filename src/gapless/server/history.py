"""Calls of tools and their results in earlier turns, checked: chats and responses have them in different spellings.

Call ids must fit together: a result answers a call before it that has no result yet. Gives templates what they expect:
arguments as an object, and the tool's name with each result.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from gapless.server.errors import ApiError
from gapless.server.tools import NAME
from gapless.text.deltas import WholeReply

CALL_FIELDS = ("id", "type", "function", "index")
FUNCTION_FIELDS = ("name", "arguments")


class CallIds:
    """The calls that wait for a result, while a conversation is read from its beginning."""

    def __init__(self) -> None:
        self._open: dict[str, str] = {}  # id to tool name

    def call(self, id: object, name: str, where: str) -> str:
        """Note a call. Raises ApiError for an id that is empty, or that a different open call has."""
        if not isinstance(id, str) or not id:
            raise ApiError(400, f"{where} must be the id of the call", param=where)
        if id in self._open:
            raise ApiError(400, f"{where}: {id!r} is the id of an earlier call that has no result yet", param=where)
        self._open[id] = name
        return id

    def result(self, id: object, where: str) -> str:
        """Note a result; returns the tool's name. Raises ApiError for an id that belongs to no open call."""
        if not isinstance(id, str) or not id:
            raise ApiError(400, f"{where} must be the id of the call that this is the result of", param=where)
        if id not in self._open:
            raise ApiError(400, f"{where}: no call before it with the id {id!r} waits for a result", param=where)
        return self._open.pop(id)

    def recall(self, talk: Collection[Mapping[str, Any]]) -> None:
        """Read turns that were checked before."""
        for turn in talk:
            for call in turn.get("tool_calls") or ():
                self._open[call["id"]] = call["function"]["name"]
            self._open.pop(turn.get("tool_call_id", ""), None)


def read_message(message: Mapping[str, Any], ids: CallIds, where: str) -> dict[str, Any]:
    """A chat message as templates expect it. Raises ApiError."""
    read = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    calls, call_id = message.get("tool_calls"), message.get("tool_call_id")
    if calls and message["role"] != "assistant":
        raise ApiError(400, f"{where}.tool_calls: only the assistant calls tools", param=f"{where}.tool_calls")
    if call_id and message["role"] != "tool":
        raise ApiError(400, f"{where}.tool_call_id: the role must be 'tool'", param=f"{where}.tool_call_id")
    if calls:
        if not isinstance(calls, list):
            raise ApiError(400, f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
        read["tool_calls"] = [_call(call, ids, f"{where}.tool_calls.{index}") for index, call in enumerate(calls)]
    if message["role"] == "tool":
        name = ids.result(call_id, f"{where}.tool_call_id")
        read |= {"tool_call_id": call_id, "name": message.get("name") or name}
    return read


def _call(call: object, ids: CallIds, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
        message = f'{where} must be {{"id": ..., "type": "function", "function": ...}}'
        raise ApiError(400, message, param=where)
    _check_names(call, CALL_FIELDS, where)
    _check_names(function, FUNCTION_FIELDS, f"{where}.function")
    name = read_name(function.get("name"), f"{where}.function.name")
    id = ids.call(call.get("id"), name, f"{where}.id")
    return told_call(id, name, read_arguments(function.get("arguments"), f"{where}.function.arguments"))


def _check_names(given: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for name in given:
        if name not in known:
            raise ApiError(400, f"{where}.{name} is not a field of a call", param=f"{where}.{name}")


def told_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call as templates expect it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def told_reply(reply: WholeReply) -> dict[str, Any]:
    """A reply as a turn of a conversation. Arguments that are not valid, or cut short, stay the text that they are."""
    turn: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        turn["reasoning_content"] = reply.reasoning
    if reply.calls:
        turn["tool_calls"] = [told_call(call.id, call.name, _object(call.arguments)) for call in reply.calls]
    return turn


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def read_name(name: object, where: str) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ApiError(400, f"{where} must be the name of a tool", param=where)
    return name


def read_arguments(text: object, where: str) -> dict[str, Any]:
    """The object that the arguments of a call are. Raises ApiError."""
    if not isinstance(text, str):
        raise ApiError(400, f"{where} must be JSON text", param=where)
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{where} is not valid JSON: {error}", param=where) from None
    if not isinstance(value, dict):
        raise ApiError(400, f"{where} must be a JSON object", param=where)
    return value
