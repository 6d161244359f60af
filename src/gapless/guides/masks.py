"""The masks of many guides at once: those of grammars side by side on threads that hold no interpreter lock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
import numpy.typing as npt

from gapless.core.guide import Guide

if TYPE_CHECKING:
    from llguidance import LLExecutor

    from gapless.guides.grammar import GrammarGuide

FEW = 2  # so many grammars are filled one after the other: to wake threads takes longer


def fill_masks(guides: Sequence[Guide], out: npt.NDArray[np.int32]) -> Mapping[int, Exception]:
    """Row i of `out` [at least len(guides), words], which is contiguous, becomes the mask of guide i.

    Returns the errors by index: a guide that fails has no mask, and all others have theirs.
    """
    width = out.shape[1]
    together = [
        (*guide.taken(), index) for index, guide in enumerate(guides) if is_grammar(guide) and guide.num_words == width
    ]
    if len(together) <= FEW:
        together = []
    else:
        together.sort(key=itemgetter(1))  # neighbours go to one thread, and guides of a group wait for each other
        pairs = [(matcher, index) for matcher, _, index in together]
        _executor().unsafe_compute_mask_ptr(pairs, out.ctypes.data, width * out.itemsize, len(out))
    alone = set(range(len(guides))).difference([index for _, _, index in together])
    errors: dict[int, Exception] = {}
    for index in sorted(alone.union([index for matcher, _, index in together if matcher.is_error()])):
        try:
            guides[index].fill(out[index])  # one that has failed says why
        except Exception as error:
            errors[index] = error
    return errors


def advance_grammars(guides: Sequence[GrammarGuide], tokens: Sequence[int]) -> Mapping[int, Exception]:
    """Each guide takes in its token. Returns the errors by index, as `fill_masks` does."""
    pairs = [(guide.matcher, token) for guide, token in zip(guides, tokens, strict=True)]
    took = _executor().consume_token_par(pairs)
    errors: dict[int, Exception] = {}
    for index, guide in enumerate(guides):
        try:
            guide.look(took[index])
        except Exception as error:
            errors[index] = error
    return errors


def is_grammar(guide: Guide | None) -> TypeGuard[GrammarGuide]:
    """Asked by name, so that the library of grammars is loaded only where there is one."""
    return type(guide).__name__ == "GrammarGuide"


@lru_cache(maxsize=1)
def _executor() -> LLExecutor:
    """One for the process. It has a thread for four of five processors, at most 32."""
    from llguidance import LLExecutor

    return LLExecutor()
