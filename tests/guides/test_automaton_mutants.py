"""Every mistake in the native automaton is seen by the tests of its masks."""

from __future__ import annotations

import pytest
from automaton_mutants import MUTANTS, Mutant, is_seen, write_mutant

from gapless.native.library import why_unavailable

needs_compiler = pytest.mark.skipif(why_unavailable() is not None, reason="needs a C++ compiler")


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mistake_can_be_made(mutant: Mutant, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Its place is still in the source, once."""
    write_mutant(mutant, tmp_path / "sources")


@needs_compiler
@pytest.mark.slow
def test_without_a_mistake_nothing_is_seen() -> None:
    assert not is_seen(None)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mistake_is_seen(mutant: Mutant) -> None:
    assert is_seen(mutant)
