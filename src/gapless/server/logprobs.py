"""Log-probabilities as the OpenAI API tells them, for chats and for completions. Knows token texts, not requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gapless.core.outcome import TokenLogprob
from gapless.text.tokenizer import Tokenizer

LEAST = -9999.0  # OpenAI's word for minus infinity, which JSON does not have


class TokenTexts:
    """What single tokens say."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.decode_raw([token], skip_special_tokens=False)

    def data(self, token: int) -> list[int]:
        """The token's bytes; one that is half a character has no text of its own."""
        text = self.text(token)
        if "\ufffd" in text and self._tokenizer is not None:
            return list(self._tokenizer.byte_pieces[token])
        return list(text.encode())


def chat_logprobs(texts: TokenTexts, scores: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Of a message, or of a piece of it."""

    def told(token: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token), "logprob": max(logprob, LEAST), "bytes": texts.data(token)}

    content = [told(s.token, s.logprob) | {"top_logprobs": [told(*pair) for pair in s.top]} for s in scores]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Of one completion: four lists side by side. Offsets go on from piece to piece."""

    def __init__(self, texts: TokenTexts) -> None:
        self._text: Callable[[int], str] = texts.text
        self._offset = 0

    def tell(self, tokens: Sequence[int], scores: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """One entry for each token; null for one without a score, which only a prompt's first token is."""
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, score in zip(tokens, scores, strict=True):
            text = self._text(token)
            told["tokens"].append(text)
            told["token_logprobs"].append(None if score is None else max(score.logprob, LEAST))
            told["top_logprobs"].append(None if score is None else self._top(score))
            told["text_offset"].append(self._offset)
            self._offset += len(text)
        return told

    def _top(self, score: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and the token itself. Of two with the same text, the likelier counts."""
        found: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            text = self._text(token)
            found[text] = max(logprob, found.get(text, LEAST))
        return found
