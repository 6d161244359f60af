"""The parts of an assistant's reply as they become known, and the reply that they add up to.

A stream sends the parts. An answer in one piece is their sum, so that both say the same. Knows no format and no wire.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself, before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a tool begins: its number in the reply, its id and the tool's name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call, as JSON text."""

    index: int
    text: str


ReplyDelta = Content | Reasoning | CallBegin | CallArguments


class DeltaParser(Protocol):
    """Text in pieces to parts of a reply. Where the text is cut makes no difference to their sum."""

    def push(self, text: str) -> list[ReplyDelta]: ...

    def finish(self) -> list[ReplyDelta]:
        """The text ends: what was held back."""
        ...


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class WholeReply:
    """Everything so far."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, deltas: Iterable[ReplyDelta]) -> None:
        for delta in deltas:
            match delta:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegin(_, id, name):
                    self.calls.append(ToolCall(id, name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
