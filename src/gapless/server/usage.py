"""Tokens in and out, as the OpenAI API counts them. Knows choices, not what they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gapless.server.generation import Choice
from gapless.server.protocol import StreamOptions
from gapless.text.reasoning import ReasoningCount

ReasoningCounts = Sequence[ReasoningCount | None]  # one a choice; None for one without reasoning


def usage(choices: Sequence[Choice], counts: ReasoningCounts | None = None) -> dict[str, Any]:
    """Of an answer so far. A prompt that several choices share counts once. counts: of the reasoning of chats."""
    prompts = {id(choice.flight.prompt): choice.flight for choice in choices}
    num_prompt = sum(len(flight.prompt) for flight in prompts.values())
    num_output = sum(choice.num_tokens for choice in choices)
    told = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(flight.num_cached or 0 for flight in prompts.values())},
    }
    if counts is None:
        return told
    num_reasoning = sum(num_reasoning_tokens(choice, count) for choice, count in zip(choices, counts, strict=True))
    return told | {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}


def num_reasoning_tokens(choice: Choice, count: ReasoningCount | None) -> int:
    return 0 if count is None else count.of(choice.tokens)


class StreamUsage:
    """Where in a stream a client wants its usage: at the end, or in each chunk."""

    def __init__(
        self, options: StreamOptions | None, choices: Sequence[Choice], counts: ReasoningCounts | None = None
    ) -> None:
        self._choices = choices
        self._counts = counts
        self._in_each = options is not None and bool(options.continuous_usage_stats)
        self.at_end = options is not None and bool(options.include_usage)

    def now(self) -> dict[str, Any]:
        return usage(self._choices, self._counts)

    def each(self) -> dict[str, Any]:
        """The usage that a chunk carries."""
        return {"usage": self.now()} if self._in_each else {}
