"""Conversations to token ids, for blocking callers: `ChatEncoder` with a template process of its own."""

from __future__ import annotations

from typing import Any

from gapless.text.conversation import ChatEncoder
from gapless.text.render_process import RenderProcess, TemplateSource
from gapless.text.tokenizer import Tokenizer


class LocalChat:
    """The first conversation starts the process; `close` ends it."""

    def __init__(self, tokenizer: Tokenizer, *, allow_special_tokens: bool = False) -> None:
        self._encoder = ChatEncoder(tokenizer, allow_special_tokens=allow_special_tokens)
        self._process = RenderProcess(template_source(tokenizer))

    def encode(self, messages: object, most: int, **extra: Any) -> list[int]:
        """Token ids. Raises InvalidRequest, and CorruptModel for a template that does not parse."""
        versions = self._encoder.versions(messages, most, extra)
        return self._encoder.tokens(versions, self._process.render(versions.conversations), most)

    def close(self) -> None:
        self._process.close()


def template_source(tokenizer: Tokenizer | None) -> TemplateSource:
    """The template of a tokenizer, with its bos and eos tokens."""
    if tokenizer is None:
        return TemplateSource(None)
    return TemplateSource(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
