"""Log-probabilities as the OpenAI API tells them, for chats, responses and completions.

Many of them take a while to put into words, and as objects would keep the garbage collector busy: they stay packed as
they came from the engine until they are told, and others have their turn in between. Knows token texts, not requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from gapless.core.outcome import TokenLogprob
from gapless.server.messages import Scores, unpack_scores
from gapless.text.tokenizer import Tokenizer

LEAST = -9999.0  # OpenAI's word for minus infinity, which JSON does not have
AT_ONCE = 64  # positions told before others have their turn


class TokenTexts:
    """What single tokens say, each looked up once."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._data: dict[int, list[int]] = {}

    def text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._read(token)
        return text

    def data(self, token: int) -> list[int]:
        """The token's bytes; one that is half a character has no text of its own."""
        data = self._data.get(token)
        if data is None:
            text = self.text(token)
            is_half = "\ufffd" in text and self._tokenizer is not None
            data = list(self._tokenizer.byte_pieces[token]) if is_half and self._tokenizer else list(text.encode())
            self._data[token] = data
        return data

    def _read(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.decode_raw([token], skip_special_tokens=False)


async def _unpacked(packed: Sequence[Scores]) -> AsyncIterator[TokenLogprob | None]:
    num_told = 0
    for scores in packed:
        for score in unpack_scores(scores):
            yield score
            num_told += 1
            if num_told % AT_ONCE == 0:
                await asyncio.sleep(0)


async def tell_logprobs(
    texts: TokenTexts, scores: Sequence[Scores], *, with_bytes: bool = True
) -> list[dict[str, Any]]:
    """Of a message, or of a piece of it: an entry for each token."""

    def told(token: int, logprob: float) -> dict[str, Any]:
        found: dict[str, Any] = {"token": texts.text(token), "logprob": max(logprob, LEAST)}
        return found | {"bytes": texts.data(token)} if with_bytes else found

    return [
        told(score.token, score.logprob) | {"top_logprobs": [told(*pair) for pair in score.top]}
        async for score in _unpacked(scores)
        if score is not None
    ]


class CompletionLogprobs:
    """Of one completion: four lists side by side. Offsets go on from piece to piece."""

    def __init__(self, texts: TokenTexts) -> None:
        self._text = texts.text
        self._offset = 0

    async def tell(self, tokens: Sequence[int], scores: Sequence[Scores]) -> dict[str, Any]:
        """One entry for each token; null for one without a score, which only a prompt's first token is."""
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        names = iter(tokens)
        async for score in _unpacked(scores):
            text = self._text(next(names))
            told["tokens"].append(text)
            told["token_logprobs"].append(None if score is None else max(score.logprob, LEAST))
            told["top_logprobs"].append(None if score is None else self._top(score))
            told["text_offset"].append(self._offset)
            self._offset += len(text)
        assert len(told["tokens"]) == len(tokens)
        return told

    def _top(self, score: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and the token itself. Of two with the same text, the likelier counts."""
        found: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            text = self._text(token)
            found[text] = max(logprob, found.get(text, LEAST))
        return found
