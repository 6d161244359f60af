"""A guide by token ids: the same tokens may come at every place. And several guides as one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from gapless.core.guide import MASK_BITS, Guide, mask_words
from gapless.errors import InvalidRequest

Mask = npt.NDArray[np.int32]


def mask_of(allowed: Collection[int] | None, vocab_size: int, bad: Collection[int] = ()) -> Mask:
    """The mask that allows these tokens of a vocabulary, all of it where None, without the bad ones."""
    bits = np.zeros(MASK_BITS * mask_words(vocab_size), np.uint8)
    if allowed is None:
        bits[:vocab_size] = 1
    else:
        bits[list(allowed)] = 1
    bits[list(bad)] = 0
    return np.packbits(bits, bitorder="little").view(np.int32)


class TokenGuide:
    """Allows what a mask allows, always."""

    waits = False
    is_over = False

    def __init__(self, mask: Mask, field: str = "allowed_token_ids") -> None:
        """field: the parameters that asked for it, for errors."""
        self._mask = mask
        self.field = field

    def advance(self, tokens: Mask) -> None:
        """Nothing changes."""

    def fill(self, out: Mask) -> None:
        out[:] = self._mask[: len(out)]


class AllOf:
    """Allows what all of its guides allow."""

    def __init__(self, guides: Sequence[Guide]) -> None:
        self._guides = guides
        fields = " and ".join(getattr(guide, "field", "structured") for guide in guides)
        self.field = " and ".join(dict.fromkeys(fields.split(" and ")))
        self.waits = any(guide.waits for guide in guides)
        self.is_over = any(guide.is_over for guide in guides)

    def advance(self, tokens: Mask) -> None:
        for guide in self._guides:
            guide.advance(tokens)
        self.is_over = any(guide.is_over for guide in self._guides)

    def fill(self, out: Mask) -> None:
        first, *others = self._guides
        first.fill(out)
        one = np.empty_like(out)
        for guide in others:
            guide.fill(one)
            out &= one
        if not out.any():
            raise InvalidRequest(f"{self.field} together leave no token here", self.field.split(" and ")[0])


def join(*guides: Guide | None) -> Guide | None:
    """Those that are there, as one; None where there is none."""
    found = [guide for guide in guides if guide is not None]
    if len(found) > 1:
        return AllOf(found)
    return found[0] if found else None
