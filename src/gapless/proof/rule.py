"""Guides for schedules: which tokens may come is drawn from a seed and the last tokens.

A rule is a value, written into a schedule. Its guide says at every place something else, so that a mask that is a token
late, of a different row or of a different step shows as a token that may not come. Knows no schedule and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gapless.core.guide import MASK_BITS
from gapless.core.request import IntArray

MEMORY = 3  # tokens that decide about the next
ROUND = 7  # tokens: a run of forced ones begins with each round, and is shorter


@dataclass(frozen=True, slots=True)
class Rule:
    """How a request is guided."""

    seed: int
    waits: bool = True  # the mask changes with each token
    over_after: int | None = None  # tokens after which nothing but the end can come
    fails_after: int | None = None  # tokens after which the guide raises
    forces: bool = False  # at some places the next few tokens are fixed

    def guide(self) -> RuleGuide:
        """A guide that has heard nothing yet."""
        return ForcingRuleGuide(self) if self.forces else RuleGuide(self)


class RuleGuide:
    """Allows about a third of the tokens, and the first of every word's worth of them."""

    def __init__(self, rule: Rule) -> None:
        self.waits = rule.waits
        self.is_over = False
        self._rule = rule
        self._num_known = 0
        self._last: list[int] = []

    def advance(self, tokens: IntArray) -> None:
        rule = self._rule
        for token in tokens.tolist():
            assert token >= 0, f"the guide was told of {token}"
            self._num_known += 1
            self._last = [*self._last, token][-MEMORY:]
        if rule.fails_after is not None and self._num_known >= rule.fails_after:
            raise ValueError(f"no rule for token {self._num_known}")
        self.is_over = rule.over_after is not None and self._num_known >= rule.over_after

    def fill(self, out: IntArray) -> None:
        key = [self._rule.seed % 2**64] if not self.waits else [self._rule.seed % 2**64, self._num_known, *self._last]
        bits = np.random.default_rng(key).random((len(out), MASK_BITS)) < 1 / 3
        bits[:, 0] = True  # a token that every vocabulary has
        out[:] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)[:, 0]


class ForcingRuleGuide(RuleGuide):
    """Also fixes some of the next tokens. Its masks do not say so: whoever fills in masks has to."""

    def forced(self) -> list[int]:
        start = self._num_known - self._num_known % ROUND
        return run_from(self._rule.seed, start)[self._num_known - start :]


def run_from(seed: int, start: int) -> list[int]:
    """The tokens that are fixed from this one on, at the begin of a round."""
    dice = np.random.default_rng([seed % 2**64, start])
    run: list[int] = dice.integers(MASK_BITS, size=dice.integers(ROUND)).tolist()
    return run
