"""What new owners of rows bring along beside their seats: the counts of their known tokens, and biases of tokens.

The device counts each token that it samples, so the host tells it the tokens from before only: the prompt, and what was
generated before the request lost an earlier row. Known tokens are told as counts, a token once: the device stores
them, and adds nothing up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gapless.core.row_fields import BIASED, COUNTED

IN_PROMPT = -(2**15)  # in a count, the sign bit: the token occurs in the prompt
MOST = 2**15 - 1  # a count of generated tokens does not go beyond
COUNT_WORDS, BIAS_WORDS = 3, 4

Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Baggage:
    """Of all new owners of a plan, in numbers of 32 bits."""

    count_rows: Words  # [num_counted] rows whose counts begin anew
    counts: Words  # [n, COUNT_WORDS] row, token, count
    biases: Words  # [n, BIAS_WORDS] row, index, token, bits of a float32

    @property
    def size(self) -> int:
        return len(self.count_rows) + self.counts.size + self.biases.size


NO_BAGGAGE = Baggage(
    np.empty(0, np.int32), np.empty((0, COUNT_WORDS), np.int32), np.empty((0, BIAS_WORDS), np.int32)
)  # of most plans


def most_baggage(num_tokens: int, num_biases: int) -> int:
    """Numbers that a request with this many known tokens and biases brings at most."""
    return (1 + COUNT_WORDS * num_tokens if num_tokens else 0) + BIAS_WORDS * num_biases


def count_tokens(prompt: Words, generated: Words) -> Words:
    """Counts [n, 2] of the tokens that occur: token, count."""
    tokens, counts = np.unique(generated, return_counts=True)
    known = np.unique(prompt)
    found = np.union1d(known, tokens)
    words = np.zeros(len(found), np.int64)
    words[np.searchsorted(found, tokens)] = np.minimum(counts, MOST)
    words[np.searchsorted(found, known)] += IN_PROMPT
    return np.stack((found, words), axis=1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Owner:
    """What baggage is made of."""

    row: int
    needs: int
    tokens: Words  # known ones
    num_prompt: int
    biases: Sequence[tuple[int, float]]


def pack_baggage(owners: Sequence[Owner]) -> Baggage:
    """The baggage of new owners; NO_BAGGAGE where nobody has any."""
    counted = [owner for owner in owners if owner.needs & COUNTED]
    biased = [owner for owner in owners if owner.needs & BIASED]
    if not counted and not biased:
        return NO_BAGGAGE
    return Baggage(
        np.array([owner.row for owner in counted], np.int32),
        np.concatenate([NO_BAGGAGE.counts, *map(_counts, counted)]),
        np.concatenate([NO_BAGGAGE.biases, *map(_biases, biased)]),
    )


def _counts(owner: Owner) -> Words:
    found = count_tokens(owner.tokens[: owner.num_prompt], owner.tokens[owner.num_prompt :])
    return np.column_stack((np.full(len(found), owner.row, np.int32), found))


def _biases(owner: Owner) -> Words:
    tokens, values = zip(*owner.biases, strict=True)
    words = np.empty((len(tokens), BIAS_WORDS), np.int32)
    words[:, 0], words[:, 1], words[:, 2] = owner.row, np.arange(len(tokens)), tokens
    words[:, 3] = np.array(values, np.float32).view(np.int32)
    return words
