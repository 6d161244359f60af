"""Masks of many guides at once equal those of each alone; one that fails does not disturb the others."""

from __future__ import annotations

import numpy as np
from wanderers import allowed, guide_for

from gapless.errors import InvalidRequest
from gapless.guides.masks import advance_together, fill_masks
from gapless.guides.vocabulary import Vocabulary
from gapless.text.tokenizer import Tokenizer


class Fixed:
    """A guide that is no grammar."""

    waits, is_over = False, False

    def advance(self, tokens: object) -> None: ...

    def fill(self, out: np.ndarray) -> None:
        out[:] = 7


def test_many_at_once(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    guides = [guide_for(vocabulary, regex=f"{char}x*") for char in "abcdefgh"]
    for index, guide in enumerate(guides):
        guide.advance(np.array(tokenizer.encode("abcdefgh"[index])[: index % 2], np.int32))
    mixed = [*guides[:3], Fixed(), *guides[3:]]
    masks = np.zeros((len(mixed) + 2, vocabulary.num_words), np.int32)
    assert not fill_masks(mixed, masks)
    for index, guide in enumerate(mixed):
        alone = np.zeros(vocabulary.num_words, np.int32)
        guide.fill(alone)
        np.testing.assert_array_equal(masks[index], alone)
    assert not masks[len(mixed) :].any()


def test_one_that_fails(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    guides = [guide_for(vocabulary, regex="ab") for _ in range(5)]
    guides[3].matcher.consume_tokens(tokenizer.encode("x"))
    masks = np.zeros((5, vocabulary.num_words), np.int32)
    errors = fill_masks(guides, masks)
    assert list(errors) == [3]
    assert isinstance(errors[3], InvalidRequest)
    assert masks[[0, 1, 2, 4]].any(axis=1).all()


def test_tokens_for_many_at_once(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    guides = [guide_for(vocabulary, regex=text) for text in ("ab", "a", "a+", "bc", "ab")]
    errors = advance_together(guides, tokenizer.encode("a") * 5)
    assert list(errors) == [3]
    assert isinstance(errors[3], InvalidRequest)
    assert [guide.is_over for guide in guides] == [False, True, False, False, False]
    assert allowed(guides[0], vocabulary) == tokenizer.encode("b")
