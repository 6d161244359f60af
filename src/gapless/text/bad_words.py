"""Bad words as token ids: as a text begins with them, and as they follow a space inside of one."""

from __future__ import annotations

from collections.abc import Sequence

from gapless.errors import InvalidRequest
from gapless.text.tokenizer import Tokenizer

BadWord = str | tuple[int, ...]


def in_tokens(words: Sequence[BadWord], tokenizer: Tokenizer | None) -> tuple[BadWord, ...]:
    """Token ids in place of each text. Raises InvalidRequest."""
    if not any(isinstance(word, str) for word in words):
        return tuple(words)
    if tokenizer is None:
        raise InvalidRequest("bad_words need a tokenizer; give token ids, or use bad_token_ids", "bad_words")
    found: list[BadWord] = []
    for word in words:
        found += _spellings(word, tokenizer) if isinstance(word, str) else [word]
    return tuple(dict.fromkeys(found))


def _spellings(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The word's tokens, and those after a space where the space only makes another token of the first one."""
    plain, spaced = (tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " "))
    is_other = bool(spaced) and len(spaced) == len(plain) and spaced[0] != plain[0]
    return [spelling for spelling in (plain, spaced if is_other else ()) if spelling]
