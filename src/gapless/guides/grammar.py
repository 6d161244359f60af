"""A guide by a grammar: llguidance's matcher, advanced by facts, asked for masks.

A compiled grammar is a matcher in its first state, whose first mask is known. A guide is a copy of it.
"""

from __future__ import annotations

import random
import re
import time

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits

from gapless.core.structured import Structured
from gapless.errors import InvalidRequest
from gapless.guides.sources import source_of
from gapless.guides.vocabulary import Vocabulary

# A quarter of llguidance's own limits for a step, and less for memory: masks are filled between two steps.
LIMITS = LLParserLimits(
    step_lexer_fuel=50_000,
    step_max_items=12_500,
    max_lexer_states=50_000,
    max_grammar_size=60_000,
    verbose_errors=False,
)
NUM_TRIED, TRIED_S = (4, 64), 0.002  # tokens of a first text: at least and at most, and more only for this time
_STATE = re.compile("<non-verbose/>|<backtrace>|<state>")  # what follows is not for clients


class Grammar:
    """A structured value, compiled for a vocabulary."""

    def __init__(self, structured: Structured, vocabulary: Vocabulary) -> None:
        """Raises InvalidRequest. May take seconds and a deep stack; holds no interpreter lock for most of it."""
        self._structured = structured
        self._num_words = vocabulary.num_words
        self._first = LLMatcher(vocabulary.tokenizer, source_of(structured, vocabulary), log_level=0, limits=LIMITS)
        self._check()
        self._try()

    def guide(self) -> GrammarGuide:
        """A guide at the begin of a text."""
        return GrammarGuide(self._first.deep_copy(), self._structured, self._num_words)

    def _try(self) -> None:
        """Walk a few tokens into a random text and back: builds what guides need first, and finds what is too slow."""
        matcher, draw, begin_s = self._first, random.Random(0), time.perf_counter()
        for number in range(NUM_TRIED[1]):
            if number >= NUM_TRIED[0] and time.perf_counter() - begin_s > TRIED_S:
                break
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            self._check()
            if matcher.is_stopped():
                break
            matcher.consume_token(draw.choice(np.flatnonzero(np.unpackbits(mask, bitorder="little"))).item())
        matcher.reset()
        self._check()

    def _check(self) -> None:
        if self._first.is_error():
            raise self._structured.refuse(plain(self._first.get_error()))


class GrammarGuide:
    """The tokens that may come next in one text."""

    waits = True

    def __init__(self, matcher: LLMatcher, structured: Structured, num_words: int) -> None:
        self.matcher = matcher
        self._structured = structured
        self.num_words = num_words  # of the masks that the matcher fills
        self.is_over = False  # nothing but the end can come

    def advance(self, tokens: npt.NDArray[np.int32]) -> None:
        if len(tokens):
            self.matcher.consume_tokens(tokens.tolist())
            self.check()
            self.is_over = self.matcher.is_stopped()

    def fill(self, out: npt.NDArray[np.int32]) -> None:
        mask = out if len(out) == self.num_words else np.empty(self.num_words, np.int32)
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.check()
        if mask is not out:
            out[:] = mask[: len(out)]

    def check(self) -> None:
        """Raise InvalidRequest if the grammar turned out to be too complex at this place."""
        if self.matcher.is_error():
            raise self.failure()

    def failure(self) -> InvalidRequest:
        return self._structured.refuse(plain(self.matcher.get_error()))


def plain(error: str) -> str:
    """An error of llguidance as one line, without its state."""
    said = " ".join(_STATE.split(error)[0].split())
    if said == "NoExtensionBias":
        return "no text has this shape"
    return said if said and not said.startswith("panic") else "it is too complex"
