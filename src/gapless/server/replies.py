"""Replies on the wire of chats: messages, and chunks of them. Parts of a reply in, JSON objects out.

`ReplyPlan` says how the text of a reply is to be read; `ReplyPlanner` makes it. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Sequence
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
)
from gapless.text.reasoning import ReasoningCount
from gapless.text.reply import ReplyFormat
from gapless.text.tokenizer import Tokenizer

AT_ONCE = 16384  # characters of a reply that are read before others have their turn


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

    def reasoning_count(self, tokenizer: Tokenizer | None) -> ReasoningCount | None:
        """For one choice; None where no reply has reasoning."""
        if tokenizer is None or self.format.reasoning is None:
            return None
        return ReasoningCount(tokenizer, self.format.reasoning, is_open=self.is_reasoning)

    async def read(self, text: str) -> WholeReply:
        """A whole text. A long one is read in pieces, so that others have their turn."""
        reply = WholeReply()
        for _ in self._read(text, reply):
            await asyncio.sleep(0)
        return reply

    def read_at_once(self, text: str) -> WholeReply:
        """A whole text, where nobody else waits."""
        reply = WholeReply()
        for _ in self._read(text, reply):
            pass
        return reply

    def _read(self, text: str, reply: WholeReply) -> Iterator[None]:
        """Read a piece at a time."""
        parser = self.parser()
        for start in range(0, len(text), AT_ONCE):
            reply.add(parser.push(text[start : start + AT_ONCE]))
            yield
        reply.add(parser.finish())
        if not self.shows_reasoning:
            reply.reasoning = ""


class ReplyPlanner:
    """Plans for the replies of one model."""

    def __init__(self, tokenizer: Tokenizer, format: ReplyFormat) -> None:
        self.format = format
        self._tokenizer = tokenizer
        self._shown: dict[bool, frozenset[int]] = {}

    def plan(
        self, toolbox: Toolbox, prompt: Sequence[int], *, begun: str = "", shows_reasoning: bool = True
    ) -> ReplyPlan:
        """How to read the replies to a prompt. begun: the part of the reply that the prompt has already."""
        is_reasoning = self.format.is_reasoning(self._tokenizer, prompt, begun)
        return ReplyPlan(self.format, toolbox, self._shown_ids(bool(toolbox.offered)), is_reasoning, shows_reasoning)

    def _shown_ids(self, with_tools: bool) -> frozenset[int]:
        """Special tokens that belong to the text of replies; looked up once, because some models have thousands."""
        if with_tools not in self._shown:
            self._shown[with_tools] = self.format.shown_ids(self._tokenizer, with_tools=with_tools)
        return self._shown[with_tools]


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
