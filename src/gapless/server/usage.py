"""Tokens in and out, as the OpenAI API counts them. Knows choices, not what they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gapless.server.generation import Choice
from gapless.server.protocol import StreamOptions


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Of an answer so far. A prompt that several choices share counts once."""
    prompts = {id(choice.flight.prompt): choice.flight for choice in choices}
    num_prompt = sum(len(flight.prompt) for flight in prompts.values())
    num_output = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(flight.num_cached or 0 for flight in prompts.values())},
    }


class StreamUsage:
    """Where in a stream a client wants its usage: at the end, or in each chunk."""

    def __init__(self, options: StreamOptions | None, choices: Sequence[Choice]) -> None:
        self._choices = choices
        self._in_each = options is not None and bool(options.continuous_usage_stats)
        self.at_end = options is not None and bool(options.include_usage)

    def now(self) -> dict[str, Any]:
        return usage(self._choices)

    def each(self) -> dict[str, Any]:
        """The usage that a chunk carries."""
        return {"usage": self.now()} if self._in_each else {}
