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
from gapless.text.detokenizer import Detokenizer, byte_of
from gapless.text.tokenizer import Tokenizer

LEAST = -9999.0  # OpenAI's word for minus infinity, which JSON does not have
AT_ONCE = 64  # positions told before others have their turn


class TokenTexts:
    """The texts of single tokens, each looked up once. With `by_id` a token is named by its id, not by its text."""

    def __init__(self, tokenizer: Tokenizer | None, *, by_id: bool = False) -> None:
        self.tokenizer = tokenizer
        self._by_id = by_id or tokenizer is None
        self._texts: dict[tuple[int, bool], str] = {}
        self._data: dict[tuple[int, bool], list[int]] = {}

    def text(self, token: int, *, first: bool = False) -> str:
        """The token's name. `first`: at the beginning of a text, where some tokens lose their space."""
        return f"token_id:{token}" if self._by_id else self._text(token, first)

    def data(self, token: int, *, first: bool = False) -> list[int]:
        """The bytes that the token adds to a text. A special token adds none."""
        data = self._data.get((token, first))
        if data is None:
            data = self._data[token, first] = list(self._bytes(token, first))
        return data

    def _bytes(self, token: int, first: bool) -> bytes:
        if self.tokenizer is None:
            return self.text(token).encode()
        if token in self.tokenizer.special_ids:
            return b""
        if (byte := byte_of(self.tokenizer, token)) is not None:
            return bytes([byte])
        text = self._text(token, first)
        return self.tokenizer.byte_pieces[token] if "\ufffd" in text else text.encode()

    def _text(self, token: int, first: bool) -> str:
        text = self._texts.get((token, first))
        if text is None:
            text = self._texts[token, first] = self._read(token, first)
        return text

    def _read(self, token: int, first: bool) -> str:
        """The text that the token adds: decoded behind itself, where nothing is dropped."""
        assert self.tokenizer is not None
        alone = self.tokenizer.decode_raw([token], skip_special_tokens=False)
        twice = self.tokenizer.decode_raw([token, token], skip_special_tokens=False)
        return alone if first or not twice.startswith(alone) else twice[len(alone) :]


async def _unpacked(packed: Sequence[Scores]) -> AsyncIterator[TokenLogprob | None]:
    num_told = 0
    for scores in packed:
        for score in unpack_scores(scores):
            yield score
            num_told += 1
            if num_told % AT_ONCE == 0:
                await asyncio.sleep(0)


async def tell_logprobs(
    texts: TokenTexts, scores: Sequence[Scores], *, begins: bool = True, with_bytes: bool = True
) -> list[dict[str, Any]]:
    """Of a message, or of a piece of it: an entry for each token. `begins`: the first one begins the message."""

    def told(token: int, logprob: float, first: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"token": texts.text(token, first=first), "logprob": max(logprob, LEAST)}
        return found | {"bytes": texts.data(token, first=first)} if with_bytes else found

    entries: list[dict[str, Any]] = []
    async for score in _unpacked(scores):
        if score is not None:
            first = begins and not entries
            top = [told(token, logprob, first) for token, logprob in score.top]
            entries.append(told(score.token, score.logprob, first) | {"top_logprobs": top})
    return entries


async def tell_prompt_logprobs(
    texts: TokenTexts, scores: Sequence[Scores], num_top: int
) -> list[dict[str, Any] | None]:
    """Of a prompt: for each token an object with the token itself and the likeliest ones, by id; null for the first."""

    def told(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": texts.text(token)}

    def entry(score: TokenLogprob) -> dict[str, Any]:
        top = enumerate(score.top[:num_top], 1)
        others = {str(token): told(token, logprob, rank) for rank, (token, logprob) in top}
        return {str(score.token): told(score.token, score.logprob, score.rank)} | others

    return [None if score is None else entry(score) async for score in _unpacked(scores)]


async def prompt_starts(tokenizer: Tokenizer | None, prompt: Sequence[int]) -> list[int]:
    """Where each token of a prompt begins in its text, special tokens written out."""
    if tokenizer is None:
        return [0] * len(prompt)
    detokenizer, starts, place = Detokenizer(tokenizer, skip_special_tokens=False), list[int](), 0
    for index, token in enumerate(prompt):
        starts.append(place)
        place += len(detokenizer.push([token]))
        if index % AT_ONCE == 0:
            await asyncio.sleep(0)
    return starts


async def tell_completion_logprobs(
    texts: TokenTexts,
    tokens: Sequence[int],
    scores: Sequence[Scores],
    starts: Sequence[int],
    num_top: int,
    *,
    begins: bool = True,
) -> dict[str, Any]:
    """Of a completion, or of a piece of it: four lists side by side; null where a prompt's first token has no score.

    `begins`: the first token begins the text.
    """
    told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    places = iter(zip(tokens, starts, strict=True))
    async for score in _unpacked(scores):
        token, start = next(places)
        told["tokens"].append(texts.text(token, first=begins and not told["tokens"]))
        told["token_logprobs"].append(None if score is None else max(score.logprob, LEAST))
        told["top_logprobs"].append(None if score is None else _top(texts, score, num_top))
        told["text_offset"].append(start)
    assert len(told["tokens"]) == len(tokens)
    return told


def _top(texts: TokenTexts, score: TokenLogprob, num_top: int) -> dict[str, float]:
    """The likeliest tokens, and the token itself. Of two with the same text, the likelier counts."""
    found: dict[str, float] = {}
    for token, logprob in (*score.top[:num_top], (score.token, score.logprob)):
        text = texts.text(token)
        found[text] = max(logprob, found.get(text, LEAST))
    return found
