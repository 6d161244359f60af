"""Replies on the wire of chats: messages, and chunks of them. Parts of a reply in, JSON objects out.

`ReplyPlan` says how the text of a reply is to be read. Knows no tokens and no HTTP.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gapless.server.tools import Toolbox
from gapless.text.deltas import (
    CallArguments,
    CallBegin,
    Content,
    DeltaParser,
    Reasoning,
    ReplyDelta,
    ToolCall,
    WholeReply,
    whole_reply,
)
from gapless.text.reply import ReplyFormat
from gapless.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ReplyPlan:
    """How to read the replies to one prompt."""

    format: ReplyFormat
    toolbox: Toolbox
    shown: Collection[int]  # special tokens that the parser needs to see
    is_reasoning: bool  # the prompt opened the reasoning
    shows_reasoning: bool = True

    def parser(self) -> DeltaParser:
        """For one choice."""
        return self.format.parser(self.toolbox.callable, is_reasoning=self.is_reasoning)

    def read(self, text: str) -> WholeReply:
        """A whole text."""
        reply = whole_reply(self.parser(), text)
        if not self.shows_reasoning:
            reply.reasoning = ""
        return reply


def plan_reply(
    format: ReplyFormat,
    tokenizer: Tokenizer,
    toolbox: Toolbox,
    prompt: Sequence[int],
    *,
    begun: str = "",
    shows_reasoning: bool = True,
) -> ReplyPlan:
    """For the replies to a prompt. begun: the part of the reply that the prompt has already."""
    return ReplyPlan(
        format,
        toolbox,
        format.shown_ids(tokenizer, with_tools=bool(toolbox.offered)),
        format.is_reasoning(tokenizer, prompt, begun),
        shows_reasoning,
    )


class ReplyStream:
    """One choice of a stream: its text in pieces to deltas on the wire."""

    def __init__(self, plan: ReplyPlan) -> None:
        self._plan = plan
        self._parser = plan.parser()
        self.num_calls = 0

    def push(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        deltas = self._parser.push(text)
        if is_last:
            deltas += self._parser.finish()
        self.num_calls += sum(isinstance(delta, CallBegin) for delta in deltas)
        shown = (delta for delta in deltas if self._plan.shows_reasoning or not isinstance(delta, Reasoning))
        return [_delta(delta) for delta in shown]


def tell_message(reply: WholeReply, echo: str) -> dict[str, Any]:
    """A whole message. Its content is null if it has calls and nothing else."""
    content = echo + reply.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message |= {"content": content or None, "tool_calls": list(_calls(reply.calls))}
    return message


def _calls(calls: Iterable[ToolCall]) -> Iterable[dict[str, Any]]:
    for call in calls:
        function = {"name": call.name, "arguments": call.arguments}
        yield {"id": call.id, "type": "function", "function": function}


def _delta(delta: ReplyDelta) -> dict[str, Any]:
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallBegin(index, id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
