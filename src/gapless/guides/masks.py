"""The masks of many guides at once: those of grammars and automata side by side on threads without interpreter lock.

Also the tokens of guides that leave no choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
import numpy.typing as npt

from gapless.core.guide import ForcingGuide, Guide, allow_only
from gapless.guides.automaton import TOOK, AutomatonGuide, advance_walkers, fill_walkers, forced_walkers

if TYPE_CHECKING:
    from llguidance import LLExecutor

    from gapless.guides.grammar import GrammarGuide

FEW = 2  # so many grammars are filled one after the other: to wake threads takes longer
SLOW_S = 0.05  # for one mask: usual ones take microseconds, and all rows of the step wait


@dataclass(frozen=True, slots=True)
class Filling:
    """What came of filling masks, by index."""

    errors: dict[int, Exception] = field(default_factory=dict)  # such a guide has no mask, and all others have theirs
    slow: dict[int, float] = field(default_factory=dict)  # seconds of work for one mask, where they are too many
    suspects: list[int] = field(default_factory=list)  # filled side by side, and one of them took too long


def fill_masks(
    guides: Sequence[Guide], out: npt.NDArray[np.int32], alone: Collection[int] = (), most: int | None = None
) -> Filling:
    """Row i of `out` [at least len(guides), words], which is contiguous, becomes the mask of guide i.

    alone: indices of grammars whose time is taken. Side by side, nobody can tell whose mask took how long.
    most: so many are filled side by side; None: all of them.
    """
    filled = _fill_automata(guides, out)
    if len(filled) == len(guides):
        return Filling()
    found = Filling()
    filled += _fill_grammars(guides, out, alone, most or len(guides), found.suspects)
    for index in sorted(set(range(len(guides))).difference(filled)):
        began_s = time.thread_time()  # its own work: neither locks nor other processes count
        _attempt(lambda i=index: guides[i].fill(out[i]), index, found.errors)  # type: ignore[misc]
        if (taken_s := time.thread_time() - began_s) > SLOW_S:
            found.slow[index] = taken_s
    return found


def advance_together(guides: Sequence[Guide], tokens: Sequence[int]) -> Mapping[int, Exception]:
    """Each guide takes in its token. Returns the errors by index, as `fill_masks` does."""
    errors: dict[int, Exception] = {}
    told = _advance_automata(guides, tokens, errors)
    if len(told) < len(guides):
        told += _advance_grammars(guides, tokens, errors)
        for index in sorted(set(range(len(guides))).difference(told)):
            token = np.array([tokens[index]], np.int32)
            _attempt(lambda i=index, t=token: guides[i].advance(t), index, errors)  # type: ignore[misc]
    return errors


def forced_runs(guides: Sequence[Guide], errors: dict[int, Exception]) -> dict[int, Sequence[int]]:
    """The tokens that must come next, by index, of the guides that leave no choice. Adds the errors of those that fail.

    A guide that failed before is not asked.
    """
    automata = [index for index, guide in enumerate(guides) if is_automaton(guide)]
    found = forced_walkers([guides[index] for index in automata]) if automata else {}  # type: ignore[misc]
    runs: dict[int, Sequence[int]] = {automata[place]: run for place, run in found.items()}
    if len(automata) < len(guides):
        for index in sorted(set(range(len(guides))).difference(automata, errors)):
            _attempt(lambda i=index: runs.update({i: forced_by(guides[i])}), index, errors)  # type: ignore[misc]
    return {index: run for index, run in runs.items() if len(run)}


def fill_mask(guide: Guide, out: npt.NDArray[np.int32]) -> None:
    """The mask of a guide. Where one text alone can come, only its next token as the tokenizer writes it."""
    guide.fill(out)
    if run := forced_by(guide):
        allow_only(run[0], out)


def _fill_automata(guides: Sequence[Guide], out: npt.NDArray[np.int32]) -> list[int]:
    """Returns those that have their masks."""
    width = out.shape[1]
    found = [index for index, guide in enumerate(guides) if is_automaton(guide) and guide.num_words == width]
    if not found:
        return []
    filled = fill_walkers([guides[index] for index in found], out, found)  # type: ignore[misc]
    return found if filled.all() else [index for index, done in zip(found, filled, strict=True) if done]


def _fill_grammars(
    guides: Sequence[Guide], out: npt.NDArray[np.int32], alone: Collection[int], most: int, suspects: list[int]
) -> list[int]:
    """Returns those that have their masks. Adds those to `suspects` whose group took too long."""
    width = out.shape[1]
    together = [
        (*guide.taken(), index)
        for index, guide in enumerate(guides)
        if is_grammar(guide) and guide.num_words == width and index not in alone
    ]
    if len(together) <= FEW:
        return []
    together.sort(key=itemgetter(1))  # neighbours go to one thread, and guides of a group wait for each other
    for start in range(0, len(together), most):
        pairs = [(matcher, index) for matcher, _, index in together[start : start + most]]
        began_s = time.perf_counter()
        _executor().unsafe_compute_mask_ptr(pairs, out.ctypes.data, width * out.itemsize, len(out))
        if time.perf_counter() - began_s > SLOW_S:
            suspects += [index for _, index in pairs]
    return [index for matcher, _, index in together if not matcher.is_error()]


def _advance_automata(guides: Sequence[Guide], tokens: Sequence[int], errors: dict[int, Exception]) -> list[int]:
    """Returns those that have their tokens, or failed."""
    found = [index for index, guide in enumerate(guides) if is_automaton(guide)]
    if not found:
        return []
    given = tokens if len(found) == len(tokens) else [tokens[index] for index in found]
    took = advance_walkers([guides[index] for index in found], given)  # type: ignore[misc]
    for place in np.flatnonzero(took != TOOK).tolist():
        guide, what = guides[found[place]], took[place]
        _attempt(lambda g=guide, w=what: g.look(w), found[place], errors)  # type: ignore[misc]
    return found


def _advance_grammars(guides: Sequence[Guide], tokens: Sequence[int], errors: dict[int, Exception]) -> list[int]:
    """Returns those that have their tokens, or failed."""
    found = [(index, guide) for index, guide in enumerate(guides) if is_grammar(guide)]
    if len(found) <= FEW:
        return []
    took = _executor().consume_token_par([(guide.matcher, tokens[index]) for index, guide in found])
    for (index, guide), was_taken in zip(found, took, strict=True):
        _attempt(lambda g=guide, w=was_taken: g.look(w), index, errors)  # type: ignore[misc]
    return [index for index, _ in found]


def _attempt(act: Callable[[], None], index: int, errors: dict[int, Exception]) -> None:
    try:
        act()
    except Exception as error:
        errors[index] = error


def is_grammar(guide: Guide | None) -> TypeGuard[GrammarGuide]:
    """Asked by name, so that the library of grammars is loaded only where there is one."""
    return type(guide).__name__ == "GrammarGuide"


def forced_by(guide: Guide) -> Sequence[int]:
    """The tokens that must come next, none of a guide that cannot tell."""
    return guide.forced() if forces(guide) else ()


def forces(guide: Guide) -> TypeGuard[ForcingGuide]:
    return hasattr(guide, "forced")


def is_automaton(guide: Guide | None) -> TypeGuard[AutomatonGuide]:
    return type(guide) is AutomatonGuide


@lru_cache(maxsize=1)
def _executor() -> LLExecutor:
    """One for the process. It has a thread for four of five processors, at most 32."""
    from llguidance import LLExecutor

    return LLExecutor()
