"""Masks of many guides at once equal those of each alone; one that fails does not disturb the others."""

from __future__ import annotations

import time

import numpy as np
import pytest
from wanderers import allowed, guide_for

import gapless.guides.masks as masks_module
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
    assert not fill_masks(mixed, masks).errors
    for index, guide in enumerate(mixed):
        alone = np.zeros(vocabulary.num_words, np.int32)
        guide.fill(alone)
        np.testing.assert_array_equal(masks[index], alone)
    assert not masks[len(mixed) :].any()


def test_one_that_fails(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    guides = [guide_for(vocabulary, regex="ab") for _ in range(5)]
    guides[3].matcher.consume_tokens(tokenizer.encode("x"))
    masks = np.zeros((5, vocabulary.num_words), np.int32)
    errors = fill_masks(guides, masks).errors
    assert list(errors) == [3]
    assert isinstance(errors[3], InvalidRequest)
    assert masks[[0, 1, 2, 4]].any(axis=1).all()


class Busy(Fixed):
    """Works for some time on each mask."""

    def fill(self, out: np.ndarray) -> None:
        until_s = time.thread_time() + 0.02
        while time.thread_time() < until_s:
            pass
        super().fill(out)


class Blocked(Fixed):
    """Waits for somebody else for as long."""

    def fill(self, out: np.ndarray) -> None:
        time.sleep(0.02)
        super().fill(out)


def test_the_time_of_those_that_are_filled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks_module, "SLOW_S", 0.01)
    masks = np.zeros((3, 4), np.int32)
    found = fill_masks([Fixed(), Busy(), Blocked()], masks)
    assert (list(found.slow), found.errors, found.suspects) == ([1], {}, [])
    assert found.slow[1] >= 0.02
    assert (masks == 7).all()


def test_of_a_slow_group_all_are_suspects_but_those_filled_alone(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    guides = [guide_for(vocabulary, regex=f"{char}x*") for char in "abcdefgh"]
    masks, expected = np.zeros((2, 8, vocabulary.num_words), np.int32)
    assert not fill_masks(guides, expected).suspects
    monkeypatch.setattr(masks_module, "SLOW_S", -1.0)  # everything is too slow
    found = fill_masks(guides, masks, alone=[2, 5], most=4)
    assert (sorted(found.suspects), sorted(found.slow)) == ([0, 1, 3, 4, 6, 7], [2, 5])
    np.testing.assert_array_equal(masks, expected)
    once = iter([0.0, 0.0, 0.0, 1.0])  # the second of two groups
    monkeypatch.setattr(masks_module, "SLOW_S", 0.5)
    monkeypatch.setattr(time, "perf_counter", lambda: next(once))
    assert len(fill_masks(guides, masks, most=4).suspects) == 4


def test_tokens_for_many_at_once(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    guides = [guide_for(vocabulary, regex=text) for text in ("ab", "a", "a+", "bc", "ab")]
    errors = advance_together(guides, tokenizer.encode("a") * 5)
    assert list(errors) == [3]
    assert isinstance(errors[3], InvalidRequest)
    assert [guide.is_over for guide in guides] == [False, True, False, False, False]
    assert allowed(guides[0], vocabulary) == tokenizer.encode("b")
