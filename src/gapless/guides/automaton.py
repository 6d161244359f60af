"""A guide by an automaton: for shapes that are regular languages, much faster than a parser.

States and masks are native (native/automaton.cpp) and shared by all texts of a shape: a mask that was filled once is
copied the next time. Everything else about a guide is as in guides/grammar.py.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from gapless.core.request import IntArray
from gapless.core.structured import Structured
from gapless.errors import InvalidRequest, NativeUnavailable
from gapless.native.library import load_automata, load_automata_held

REFUSED, TOOK, IS_OVER, TOO_COMPLEX = range(4)  # automaton.cpp has the same list
SCHEMA, COMPACT_SCHEMA, CHOICE, REGEX = range(4)  # likewise
MOST_FORCED = 128  # bytes; automaton.cpp has the same number
SHORT = 4096  # bytes of a source that takes some tens of microseconds to compile
NUM_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))  # that fill masks, with the caller

# (text, whether nothing follows it) -> the tokens in which the tokenizer writes it, as far as they are sure
Spell = Callable[[bytes, bool], tuple[int, ...]]


class ByteVocabulary:
    """The bytes of every token as the library keeps them: made once for a vocabulary."""

    def __init__(self, texts: Sequence[bytes], ends: Sequence[int], spell: Spell) -> None:
        """texts: by token, empty for those that no text has. ends: tokens that end a text. Raises NativeUnavailable."""
        self.spell = spell
        self.library = load_automata()
        self.held = load_automata_held()  # for short calls
        offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        joined, last = b"".join(texts), np.array(ends, np.int32)
        self.handle = self.library.gapless_vocabulary(
            len(texts), offsets.ctypes.data, joined, last.ctypes.data, len(last), NUM_THREADS
        )
        weakref.finalize(self, self.library.gapless_drop_vocabulary, self.handle).atexit = False

    @property
    def num_state_bytes(self) -> int:
        """Memory of the states and masks of all automata."""
        found: int = self.held.gapless_state_bytes(self.handle)
        return found


class Automaton:
    """A shape, ready for guides."""

    def __init__(self, structured: Structured, vocabulary: ByteVocabulary, num_words: int, handle: int) -> None:
        """num_words: of a mask. handle: the library's; it is dropped with this object."""
        self.structured = structured
        self.num_words = num_words
        self.is_spent = False  # it has grown too large: make it again
        self.vocabulary = vocabulary
        self._handle = handle
        self._drop = vocabulary.held.gapless_drop_automaton

    def __del__(self) -> None:
        self._drop(self._handle)

    @property
    def num_bytes(self) -> int:
        found: int = self.vocabulary.held.gapless_automaton_bytes(self._handle)
        return found

    def guide(self) -> AutomatonGuide:
        """A guide at the begin of a text."""
        return AutomatonGuide(self)

    def walker(self) -> int:
        """A text on its way, which the caller drops."""
        made: int = self.vocabulary.held.gapless_walker(self._handle)
        return made

    def failure(self, took: int) -> InvalidRequest:
        self.is_spent = self.is_spent or took == TOO_COMPLEX
        return self.structured.refuse("it is too complex" if took == TOO_COMPLEX else "a token does not fit it")


class AutomatonGuide:
    """The tokens that may come next in one text."""

    waits = True

    def __init__(self, automaton: Automaton) -> None:
        self.num_words = automaton.num_words  # of the masks that are filled
        self.is_over = False  # nothing but the end can come
        # Tokens that must come. Kept until they have come: their rest, spelled by itself, may be other tokens.
        self.run: tuple[int, ...] = ()
        self._automaton = automaton

    @cached_property
    def walker(self) -> int:
        """Made when the guide is first asked, not when the request comes."""
        return self._automaton.walker()

    def __del__(self) -> None:
        if "walker" in self.__dict__:
            self._automaton.vocabulary.held.gapless_drop_walker(self.walker)

    @property
    def library(self) -> ctypes.CDLL:
        return self._automaton.vocabulary.library

    @property
    def spell(self) -> Spell:
        return self._automaton.vocabulary.spell

    def forced(self) -> Sequence[int]:
        return forced_walkers([self]).get(0, ())

    def advance(self, tokens: IntArray) -> None:
        for token in tokens.tolist():
            self.forced()  # tokens that were sampled elsewhere may end within a run
            self.look(int(advance_walkers([self], [token])[0]))

    def look(self, took: int) -> None:
        """After a token: what came of it."""
        if took in (REFUSED, TOO_COMPLEX):
            raise self._automaton.failure(took)
        self.is_over = took == IS_OVER

    def fill(self, out: IntArray) -> None:
        mask = np.empty((1, self.num_words), np.int32)
        if not fill_walkers([self], mask, [0])[0]:
            raise self._automaton.failure(TOO_COMPLEX)
        out[:] = mask[0, : len(out)]


def automaton_of(
    structured: Structured, vocabulary: ByteVocabulary | None, num_words: int, *, at_once: bool = False
) -> Automaton | None:
    """None where the shape is none of those that have an automaton, or there is no library.

    at_once: also None where it would take longer than some tens of microseconds. The interpreter lock is kept then.
    """
    kind = _kind(structured)
    if vocabulary is None or kind is None:
        return None
    text = structured.text.encode()
    if at_once and len(text) > SHORT:
        return None
    library = vocabulary.held if at_once else vocabulary.library
    handle = library.gapless_automaton(vocabulary.handle, kind, text, len(text), at_once)
    return None if handle is None else Automaton(structured, vocabulary, num_words, handle)


def _kind(structured: Structured) -> int | None:
    match structured.kind, structured.whitespace:
        case "json_schema", None:
            return SCHEMA
        case "json_schema", "":
            return COMPACT_SCHEMA
        case "choice", _:
            return CHOICE
        case "regex", _:
            return REGEX
    return None


def byte_vocabulary(texts: Sequence[bytes], ends: Sequence[int], spell: Spell) -> ByteVocabulary | None:
    """None where there is no library: grammars do the work then."""
    try:
        return ByteVocabulary(texts, ends, spell)
    except NativeUnavailable:
        return None


def advance_walkers(guides: Sequence[AutomatonGuide], tokens: Sequence[int]) -> IntArray:
    """Each guide's text goes on by a token. Returns what came of it, for `look`."""
    walkers, took = np.array([guide.walker for guide in guides], np.uintp), np.empty(len(guides), np.int32)
    given = np.array(tokens, np.int32)
    guides[0].library.gapless_advance(walkers.ctypes.data, given.ctypes.data, len(guides), took.ctypes.data)
    for guide, token in zip(guides, tokens, strict=True):
        if guide.run:
            guide.run = guide.run[1:] if guide.run[0] == token else ()
    return took


def fill_walkers(guides: Sequence[AutomatonGuide], out: IntArray, rows: Sequence[int]) -> IntArray:
    """The mask of each guide to its row of `out` [n, num_words]. Returns 0 for each whose shape is too complex."""
    walkers, filled = np.array([guide.walker for guide in guides], np.uintp), np.empty(len(guides), np.int32)
    places = np.array(rows, np.int32)
    guides[0].library.gapless_fill(
        walkers.ctypes.data, len(guides), places.ctypes.data, out.ctypes.data, out.shape[1], filled.ctypes.data
    )
    return filled


def forced_walkers(guides: Sequence[AutomatonGuide]) -> dict[int, tuple[int, ...]]:
    """The tokens that must come next, by index, for guides whose text has one continuation only."""
    if asked := [guide for guide in guides if not guide.run]:
        walkers, sizes = np.array([guide.walker for guide in asked], np.uintp), np.empty(len(asked), np.int32)
        texts = np.empty((len(asked), MOST_FORCED), np.uint8)
        asked[0].library.gapless_forced(walkers.ctypes.data, len(asked), texts.ctypes.data, sizes.ctypes.data)
        for i in np.flatnonzero(sizes).tolist():
            asked[i].run = asked[i].spell(texts[i, : abs(sizes[i])].tobytes(), bool(sizes[i] < 0))
    return {index: guide.run for index, guide in enumerate(guides) if guide.run}
