"""An answer on its way: its parts, which are those of every reply (`text.deltas`), and how it ended.

Also says what a partner is. Knows no terminal, and not who answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gapless.text.deltas import ReplyDelta, ToolCall, WholeReply
from gapless.text.tools.base import Tool


@dataclass(frozen=True, slots=True)
class ReplyEnd:
    """How an answer ended, and its size; a server may not tell the size."""

    reason: str  # "stop", "length", "tool_calls" or "abort"
    num_prompt: int | None = None  # tokens
    num_tokens: int | None = None


class Partner(Protocol):
    """Somebody who answers."""

    @property
    def description(self) -> str:
        """Model, place and context length, for people."""

    def answer(
        self, messages: Sequence[Mapping[str, Any]], params: Mapping[str, Any], tools: Sequence[Tool]
    ) -> Iterator[ReplyDelta | ReplyEnd]:
        """The parts of an answer, and its end. Closing the iterator ends it. Raises GaplessError."""

    def close(self) -> None: ...


def as_message(reply: WholeReply) -> dict[str, Any]:
    """An answer as a message of the conversation. Reasoning is not repeated to the model."""
    calls = [_wire(call) for call in reply.calls]
    return {"role": "assistant", "content": reply.content} | ({"tool_calls": calls} if calls else {})


def is_whole(call: ToolCall) -> bool:
    """Whether the arguments are an object, so that the conversation can go on with the call's result."""
    try:
        return isinstance(json.loads(call.arguments or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def _wire(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
