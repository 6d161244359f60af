"""Allowed and bad tokens and words: masks against a plain search in the output, alone and joined with others."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.core.guide import Guide, mask_words
from gapless.core.params import SamplingParams
from gapless.errors import InvalidRequest
from gapless.guides.tokens import TokenGuide, join, mask_of
from gapless.guides.words import WordGuide, guide_of

VOCAB = 67


def allowed_by(guide: Guide) -> set[int]:
    mask = np.zeros(mask_words(VOCAB), np.int32)
    guide.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]).tolist())


@given(st.sets(st.integers(0, VOCAB - 1), min_size=1))
def test_a_fixed_mask_allows_its_tokens(tokens: set[int]) -> None:
    guide = TokenGuide(mask_of(tokens, VOCAB))
    guide.advance(np.array([3], np.int32))
    assert allowed_by(guide) == tokens
    assert not guide.waits


words = st.lists(st.sampled_from([0, 1, 2, 31, 63, 66]), min_size=1, max_size=4).map(tuple)


@given(st.lists(words, min_size=1, max_size=6), st.lists(st.lists(st.sampled_from([0, 1, 2, 31, 63, 66]), max_size=3)))
def test_a_token_is_bad_where_it_would_complete_a_word(bad: list[tuple[int, ...]], pieces: list[list[int]]) -> None:
    guide = guide_of(SamplingParams(bad_words=tuple(bad)), VOCAB)
    assert guide is not None
    assert guide.waits == any(len(word) > 1 for word in bad)
    output: list[int] = []
    for piece in pieces:
        guide.advance(np.array(piece, np.int32))
        output += piece
        ends = {word[-1] for word in bad if (*output, word[-1])[-len(word) :] == word}
        assert allowed_by(guide) == set(range(VOCAB)) - ends


def test_all_that_is_asked_for_counts() -> None:
    params = SamplingParams(allowed_token_ids=[1, 2, 3, 4], bad_token_ids=[2], bad_words=[[3], [1, 4]])
    guide = guide_of(params, VOCAB)
    assert guide is not None
    assert allowed_by(guide) == {1, 4}
    guide.advance(np.array([1], np.int32))
    assert allowed_by(guide) == {1}
    joined = join(guide, None, WordGuide([(1, 1)]))
    assert joined is not None
    joined.advance(np.array([1], np.int32))
    with pytest.raises(InvalidRequest, match="and bad_token_ids and bad_words together leave no token here"):
        allowed_by(joined)
    assert guide_of(SamplingParams(), VOCAB) is None


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"allowed_token_ids": [4], "bad_words": [[4]]}, "no token is left"),
        ({"bad_words": ["word"]}, "need a tokenizer"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        guide_of(SamplingParams(**asked), VOCAB)


def test_bad_tokens_of_a_large_vocabulary_cost_little() -> None:
    """An engine's intake makes guides one after the other: a set of all tokens took 77 ms for each request."""
    began_s = time.perf_counter()
    for _ in range(100):
        guide_of(SamplingParams(bad_token_ids=[1, 151_935]), 151_936)
    assert time.perf_counter() - began_s < 2.0
