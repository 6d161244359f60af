"""A guide by bad words: sequences of tokens that must not occur in the output.

The last token of a sequence is forbidden where the output ends with all tokens before it. Sequences are found by the
token before their last one, so that a place costs what those cost which could end there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from gapless.core.guide import MASK_BITS, Guide
from gapless.core.params import SamplingParams
from gapless.errors import InvalidRequest
from gapless.guides.tokens import Mask, TokenGuide, join, mask_of


class WordGuide:
    """Allows everything but the ends of bad words."""

    waits = True
    is_over = False
    field = "bad_words"

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        """words: of two tokens or more."""
        self._words: dict[int, list[tuple[int, ...]]] = defaultdict(list)  # by the token before the last one
        for word in words:
            self._words[word[-2]].append(tuple(word))
        self._longest = max(len(word) for group in self._words.values() for word in group)
        self._last: tuple[int, ...] = ()  # tokens of the output, as many as matter

    def advance(self, tokens: Mask) -> None:
        self._last = (*self._last, *tokens.tolist())[1 - self._longest :]

    def fill(self, out: Mask) -> None:
        out[:] = -1
        for word in self._words.get(self._last[-1], ()) if self._last else ():
            if self._last[1 - len(word) :] == word[:-1]:
                out.view(np.uint32)[word[-1] // MASK_BITS] &= ~np.uint32(1 << word[-1] % MASK_BITS)


def guide_of(params: SamplingParams, vocab_size: int) -> Guide | None:
    """The guide that allowed and bad tokens and words ask for. Raises InvalidRequest."""
    words = [word for word in params.bad_words if not isinstance(word, str)]
    if len(words) < len(params.bad_words):
        raise InvalidRequest("bad_words need a tokenizer; give token ids, or use bad_token_ids", "bad_words")
    bad = {*params.bad_token_ids, *(word[0] for word in words if len(word) == 1)}
    fixed = None
    if params.allowed_token_ids is not None or bad:
        mask = mask_of(params.allowed_token_ids, vocab_size, bad)
        if not mask.any():
            raise InvalidRequest("no token is left: all that are allowed are bad", "bad_token_ids")
        given = {"allowed_token_ids": params.allowed_token_ids, "bad_token_ids": params.bad_token_ids}
        fields = [name for name, ids in given.items() if ids] + (["bad_words"] if bad - {*params.bad_token_ids} else [])
        fixed = TokenGuide(mask, " and ".join(fields))
    longer = [word for word in words if len(word) > 1]
    return join(fixed, WordGuide(longer) if longer else None)
