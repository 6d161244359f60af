"""A guide: which tokens may come next for one request, told by the tokens that are known.

The protocol alone: implementations live in guides/, and the scheduler needs none. Only facts reach a guide, never
a promise, so that it has no way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

MASK_BITS = 32  # tokens that a word of a mask stands for


class Guide(Protocol):
    """Says which tokens may come next."""

    waits: bool  # the mask changes with each token; False: it is always the same
    is_over: bool  # nothing but the end can come: the request ends here, without a further token

    def advance(self, tokens: npt.NDArray[np.int32]) -> None:
        """Take in the tokens that became known since the last call."""

    def fill(self, out: npt.NDArray[np.int32]) -> None:
        """Write the mask [mask_words(vocab)]: bit t % 32 of word t // 32 says that token t may come."""


class ForcingGuide(Guide, Protocol):
    """A guide that knows where its text has one continuation only."""

    def forced(self) -> Sequence[int]:
        """The tokens that must come next, in the tokenizer's own spelling; none where there is a choice."""


def allow_only(token: int, out: npt.NDArray[np.int32]) -> None:
    """Write the mask that allows one token."""
    out[:] = 0
    out.view(np.uint32)[token // MASK_BITS] = 1 << token % MASK_BITS


def mask_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // MASK_BITS)
