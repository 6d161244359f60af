"""A guide by a grammar: llguidance's matcher, advanced by facts, asked for masks.

A compiled grammar has a few matchers in their first state, whose first masks are known. A guide copies one of them.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits

from gapless.core.structured import Structured
from gapless.errors import InvalidRequest
from gapless.guides.sources import source_of
from gapless.guides.vocabulary import Vocabulary, up_to_unknown

# A quarter of llguidance's own limits for a step, and less for memory: masks are filled between two steps.
LIMITS = LLParserLimits(
    step_lexer_fuel=50_000,
    step_max_items=12_500,
    max_lexer_states=50_000,
    max_grammar_size=60_000,
    verbose_errors=False,
)
NUM_TRIED, TRIED_S = (4, 64), 0.002  # tokens of a first text: at least and at most, and more only for this time
SLOW_S = 1.0  # to compile: such a grammar keeps its one matcher, because others wait for the thread
MAX_MATCHERS = max(1, min(8, (os.cpu_count() or 1) // 2))  # of one grammar
_STATE = re.compile("<non-verbose/>|<backtrace>|<state>")  # what follows is not for clients
_REGEX_FAULT = re.compile(r"regex parse error: .*? error: (.*?)(?: \d+ \| .*)?$")  # around it: our own Lark


class Grammar:
    """A structured value, compiled for a vocabulary.

    Copies of a matcher share an automaton, which grows while it is used, and a lock: their masks are filled one after
    the other. A grammar that is used again therefore gets several matchers, compiled in the background.
    """

    def __init__(
        self,
        structured: Structured,
        vocabulary: Vocabulary,
        in_background: Callable[[Callable[[], None]], None] = lambda job: None,
    ) -> None:
        """Raises InvalidRequest. May take seconds and a deep stack; holds no interpreter lock for most of it.

        in_background: calls a function later, on a thread like this one.
        """
        self.structured = structured
        self.num_words = vocabulary.num_words
        self.model_size = vocabulary.model_size
        self.is_spent = False  # its automaton has reached a limit: compile it again
        self.num_bytes = 0  # llguidance does not tell
        self._tokenizer = vocabulary.tokenizer
        self._source = source_of(structured, vocabulary)
        self._in_background = in_background
        began_s = time.perf_counter()
        self._matchers = [self._compile()]
        self._is_slow = time.perf_counter() - began_s > SLOW_S
        self._num_guides = 0
        self._num_taken = 0

    def guide(self) -> GrammarGuide:
        """A guide at the begin of a text."""
        self._num_guides += 1
        if self._num_guides == 2 and len(self._matchers) < MAX_MATCHERS and not self._is_slow:
            self._in_background(self._compile_more)
        return GrammarGuide(self)

    def take(self) -> tuple[LLMatcher, int]:
        """A matcher for a guide, and the number of those that it shares an automaton with."""
        matcher = self._matchers[self._num_taken % len(self._matchers)]
        self._num_taken += 1
        return matcher.deep_copy(), id(matcher)

    def failure(self, matcher: LLMatcher) -> InvalidRequest:
        self.is_spent = True
        said = plain(matcher.get_error())
        fault = _REGEX_FAULT.search(said) if self.structured.kind == "regex" else None
        return self.structured.refuse(fault[1] if fault else said)

    def _compile_more(self) -> None:
        """One matcher at a time: in between, the thread takes grammars that somebody waits for."""
        self._matchers.append(self._compile())
        if len(self._matchers) < MAX_MATCHERS:
            self._in_background(self._compile_more)

    def _compile(self) -> LLMatcher:
        """Then walk a few tokens into a random text and back: builds what guides need, and finds what is too slow."""
        matcher = LLMatcher(self._tokenizer, self._source, log_level=0, limits=LIMITS)
        draw, begin_s = random.Random(0), time.perf_counter()
        self._check(matcher)
        for number in range(NUM_TRIED[1]):
            if number >= NUM_TRIED[0] and time.perf_counter() - begin_s > TRIED_S:
                break
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            self._check(matcher)
            if matcher.is_stopped():
                break
            matcher.consume_token(draw.choice(np.flatnonzero(np.unpackbits(mask, bitorder="little"))).item())
        matcher.reset()
        self._check(matcher)
        return matcher

    def _check(self, matcher: LLMatcher) -> None:
        if matcher.is_error():
            raise self.failure(matcher)


class GrammarGuide:
    """The tokens that may come next in one text. Takes a matcher when it is first asked, not when it is made."""

    waits = True

    def __init__(self, grammar: Grammar) -> None:
        self.num_words = grammar.num_words  # of the masks that the matcher fills
        self.is_over = False  # nothing but the end can come
        self._grammar = grammar
        self._taken: tuple[LLMatcher, int] | None = None

    @property
    def matcher(self) -> LLMatcher:
        return self.taken()[0]

    def taken(self) -> tuple[LLMatcher, int]:
        """The matcher, and its group: guides of one group are filled one after the other."""
        if self._taken is None:
            self._taken = self._grammar.take()
        return self._taken

    def advance(self, tokens: npt.NDArray[np.int32]) -> None:
        if len(tokens):
            self.look(self.matcher.consume_tokens(tokens.tolist()))

    def look(self, took: bool) -> None:
        """After the matcher was given tokens: whether it took them, and whether that was the end."""
        matcher = self.taken()[0]
        if not took:
            raise self._grammar.failure(matcher)
        self.is_over = matcher.is_stopped()

    def forced(self) -> Sequence[int]:
        return up_to_unknown(self.matcher.compute_ff_tokens(), self._grammar.model_size)

    def fill(self, out: npt.NDArray[np.int32]) -> None:
        mask = out if len(out) == self.num_words else np.empty(self.num_words, np.int32)
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self.matcher.is_error():  # too complex at this place
            raise self._grammar.failure(self.matcher)
        if mask is not out:
            out[:] = mask[: len(out)]


def plain(error: str) -> str:
    """An error of llguidance as one line, without its state."""
    said = " ".join(_STATE.split(error)[0].split())
    if said == "NoExtensionBias":
        return "no text has this shape"
    return said if said and not said.startswith("panic") else "it is too complex"
