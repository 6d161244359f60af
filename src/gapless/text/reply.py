"""The form of a model's replies: where its reasoning stands, and how it calls tools.

Found once for a model; then it gives each reply its parser. Does not know the wire, or how tokens become text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gapless.text.deltas import Content, DeltaParser, Reasoning, ReplyDelta
from gapless.text.reasoning import ReasoningFormat, ReasoningSplitter, find_reasoning
from gapless.text.tokenizer import Tokenizer
from gapless.text.tools.base import Tool, ToolFormat
from gapless.text.tools.call_parser import CallParser
from gapless.text.tools.find import find_format

NUM_LAST_TOKENS = 16  # of a prompt: enough for a tag that opens the reasoning, and the spaces after it


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """The formats of one model."""

    tools: ToolFormat
    reasoning: ReasoningFormat | None

    def parser(self, tools: Sequence[Tool], *, is_reasoning: bool) -> DeltaParser:
        """For one reply. tools: those that may be called. is_reasoning: the prompt opened the reasoning."""
        schemas = {tool.name: tool.parameters for tool in tools}
        calls = CallParser(self.tools.syntax, schemas) if tools else PlainParser()
        if self.reasoning is None:
            return calls
        return ReplyParser(ReasoningSplitter(self.reasoning, is_open=is_reasoning), calls)

    def shown_ids(self, tokenizer: Tokenizer, *, with_tools: bool) -> frozenset[int]:
        """Special tokens that the parser needs to see in the text."""
        tags = [self.reasoning.begin, self.reasoning.end] if self.reasoning is not None else []
        tags += self.tools.syntax.tags if with_tools else ()
        texts = {id: tokenizer.id_to_token(id) or "" for id in tokenizer.special_ids} if tags else {}
        return frozenset(id for id, text in texts.items() if text and any(text in tag for tag in tags))

    def is_reasoning(self, tokenizer: Tokenizer, prompt: Sequence[int], begun: str = "") -> bool:
        """Whether a reply begins inside a reasoning part. begun: the part of it that the prompt has already."""
        if self.reasoning is None:
            return False
        if self.reasoning.is_open(begun):
            return True
        text = tokenizer.decode(prompt[-NUM_LAST_TOKENS:], skip_special_tokens=False)
        return text.rstrip().endswith(self.reasoning.begin.rstrip())


def find_reply_format(tokenizer: Tokenizer, tools: str = "auto", reasoning: str = "auto") -> ReplyFormat:
    """From a model's template and vocabulary, or by name. Raises ConfigError."""
    template = tokenizer.chat_template

    def has_token(text: str) -> bool:
        return tokenizer.token_to_id(text) is not None

    return ReplyFormat(find_format(template, tools), find_reasoning(template, has_token, reasoning))


class PlainParser:
    """All of it is content."""

    def push(self, text: str) -> list[ReplyDelta]:
        return [Content(text)] if text else []

    def finish(self) -> list[ReplyDelta]:
        return []


class ReplyParser:
    """Reasoning first, then content and calls."""

    def __init__(self, splitter: ReasoningSplitter, calls: DeltaParser) -> None:
        self._splitter = splitter
        self._calls = calls

    def push(self, text: str) -> list[ReplyDelta]:
        split = self._splitter.push(text)
        return [*_reasoning(split.reasoning), *self._calls.push(split.answer)]

    def finish(self) -> list[ReplyDelta]:
        split = self._splitter.finish()
        return [*_reasoning(split.reasoning), *self._calls.push(split.answer), *self._calls.finish()]


def _reasoning(text: str) -> list[ReplyDelta]:
    return [Reasoning(text)] if text else []
