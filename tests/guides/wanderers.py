"""Guides for tests: a vocabulary, random texts that a guide allows, and texts that it accepts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gapless.core.guide import Guide
from gapless.core.structured import read_structured
from gapless.guides.grammar import Grammar, GrammarGuide
from gapless.guides.vocabulary import Vocabulary
from gapless.text.tokenizer import Tokenizer


def guide_for(vocabulary: Vocabulary, **spec: Any) -> GrammarGuide:
    return Grammar(read_structured(spec), vocabulary).guide()


def allowed(guide: Guide, vocabulary: Vocabulary) -> list[int]:
    mask = np.full(vocabulary.num_words, -1, np.int32)
    guide.fill(mask)
    return [int(token) for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def wander(guide: Guide, vocabulary: Vocabulary, tokenizer: Tokenizer, seed: int = 0, most: int = 400) -> str | None:
    """A random text that the guide allows, to its end; None if it has not ended by then."""
    rng, tokens = np.random.default_rng(seed), list[int]()
    while not guide.is_over:
        if len(tokens) == most:
            return None
        tokens.append(int(rng.choice(allowed(guide, vocabulary))))
        guide.advance(np.array(tokens[-1:], np.int32))
    return tokenizer.decode(tokens)


def accepts(guide: GrammarGuide, tokens: Sequence[int]) -> bool:
    """Whether these tokens, and then the end, may come."""
    return guide.matcher.try_consume_tokens(list(tokens)) == len(tokens) and guide.matcher.is_accepting()
