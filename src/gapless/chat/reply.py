"""An answer as its parts come in: text, reasoning, tool calls, and how it ended.

The parts are those of OpenAI's stream, whoever answers. Knows no terminal, and not who answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gapless.chat.tool_file import ToolList


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of a tool call. The first part of a call has its id and its name, each part some of the arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ReplyEnd:
    """How an answer ended, and its size; a server may not tell the size."""

    reason: str  # "stop", "length", "tool_calls" or "abort"
    num_prompt: int | None = None  # tokens
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """A part of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
    end: ReplyEnd | None = None


class Partner(Protocol):
    """Somebody who answers."""

    @property
    def description(self) -> str:
        """Model, place and context length, for people."""

    def answer(
        self, messages: Sequence[Mapping[str, Any]], params: Mapping[str, Any], tools: ToolList
    ) -> Iterator[ReplyPart]:
        """The parts of an answer. Closing the iterator ends it. Raises GaplessError."""

    def close(self) -> None: ...


class HeardReply:
    """One answer so far."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._calls: dict[int, CallPart] = {}
        self.end: ReplyEnd | None = None

    def add(self, part: ReplyPart) -> None:
        self._texts.append(part.text)
        self.end = part.end or self.end
        for call in part.calls:
            known = self._calls.get(call.index, CallPart(call.index))
            self._calls[call.index] = CallPart(
                call.index, known.id or call.id, known.name or call.name, known.arguments + call.arguments
            )

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def calls(self) -> list[CallPart]:
        """The tool calls, complete once the answer is."""
        return [self._calls[index] for index in sorted(self._calls)]

    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation. Reasoning is not repeated to the model."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self._calls:
            message["tool_calls"] = [_wire(call) for call in self.calls]
        return message


def _wire(call: CallPart) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
