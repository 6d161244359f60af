"""One mistake after another in a copy of the native automaton: the tests of its masks must see each.

`python tests/guides/automaton_mutants.py` tries all of them, a few seconds each; `make mutants` runs it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gapless.native import library

TESTS = Path(__file__).parent
UNBUILT = 99  # exit status
TIME_S = 120.0  # past this a mutant has made something endless, which is seen too
RUN = """
import sys
from pathlib import Path

import pytest

from gapless.errors import NativeUnavailable
from gapless.native import library

library.SOURCES = Path(sys.argv[1])
library.FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in library.FLAGS)
try:
    library.load_automata()
except NativeUnavailable as error:
    sys.exit(print(error) or 99)
sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not slow", *sys.argv[2:]]))
"""


@dataclass(frozen=True)
class Mutant:
    """A mistake: a text of a source that occurs once, and what stands in its place."""

    source: str
    right: str
    wrong: str

    def __str__(self) -> str:
        return f"{self.source}: {self.right} -> {self.wrong}"


MUTANTS = (
    Mutant("automaton.h", "return states_[number]->accepts && states_[number]->count == 1;", "return false;"),
    Mutant("automaton.h", "states_[number]->accepts && states_[number]->count == 1", "states_[number]->accepts"),
    Mutant("automaton.h", "out[state.extra[i].place] |= state", "out[state.extra[i].place] = state"),
    Mutant("automaton.h", "if (left > 0 && left < far) left--;", "if (left > 0) left--;"),
    Mutant("automaton.h", "if (left > 0 && left < far) left--;", ""),
    Mutant("automaton.h", "if (left <= 0) ways.push_back(pc + 1);", "ways.push_back(pc + 1);"),
    Mutant("automaton.h", "if (at.a == 0) ways.push_back(pc + 1);", ""),
    Mutant("automaton.h", "if (at.b != 0) items.push_back({pc, BEGIN, 0});", "items.push_back({pc, BEGIN, 0});"),
    Mutant("automaton.h", "if (used != at.b) items", "items"),
    Mutant("automaton.h", "if (used >= at.a) close", "close"),
    Mutant("automaton.h", "item.part <= MAX_INDENT && is_blank", "is_blank"),
    Mutant("automaton.h", "item.part == 0 && byte == '\\n', is_blank", "byte == '\\n', is_blank"),
    Mutant("automaton.h", "if (is_full || !behind.is_apart || others", "if (is_full || others"),
    Mutant("automaton.h", "if (may_leave) more = states_[behind.state];", ""),
    Mutant("automaton.h", "is_between(letters, missing, room)", "is_between(letters, 0, room)"),
    Mutant("automaton.h", "is_between(letters, missing, room)", "is_between(letters, missing, INT32_MAX)"),
    Mutant("automaton.h", "if (letters <= room) tokens", "if (letters < room) tokens"),
    Mutant("automaton.h", "base = &table.within(room);", "base = &table.within(room + 1);"),
    Mutant("automaton.h", "if (state.accepts) tokens.insert", "if (false) tokens.insert"),
    Mutant("automaton.h", "for (uint32_t place : touched) bits[place] = 0;", ""),
    Mutant("automaton.h", "if (states_.size() >= MAX_STATES) return is_full = true, DEAD;", ""),
    Mutant("automaton.cpp", "return automaton.accepts(number) ? IS_OVER : REFUSED;", "return IS_OVER;"),
    Mutant("automaton.cpp", "if (next == DEAD) return REFUSED;", "if (next == DEAD) return TOOK;"),
    Mutant("automaton.cpp", "return automaton.is_over(now) ? IS_OVER : TOOK;", "return TOOK;"),
    Mutant("integer_program.h", "if (low_rest != zeros) add(", "if (false) add("),
    Mutant("integer_program.h", "if (high_rest != nines) last--;", ""),
    Mutant("integer_program.h", "digits(width, UNBOUNDED);", "digits(width + 1, UNBOUNDED);"),
    Mutant("schema_program.h", "if (is_counted) put(COUNT);", ""),
    Mutant("schema_program.h", "program.num_counted = fewest - 1;", "program.num_counted = fewest;"),
    Mutant("schema_program.h", "may_pass = !required.contains(properties.names[i]);", "may_pass = true;"),
    Mutant("schema_program.h", "most == UNBOUNDED ? UNBOUNDED : most - 1);", "most);"),
    Mutant("schema_program.h", "whole(given) - less", "whole(given)"),
    Mutant("program.h", "for (int64_t i = 0; i < fewest; i++) part();", "if (fewest > 0) part();"),
    Mutant("letters.h", "set(AFTER_ED, 0x80, 0x9f, LAST1)", "set(AFTER_ED, 0x80, 0xbf, LAST1)"),
    Mutant("letters.h", "set(U000, b, b, BEGIN);", 'if (strchr("89acdACD", b) == nullptr) set(U000, b, b, BEGIN);'),
    Mutant("letters.h", "std::min(at->second, to) - origin", "at->second - origin"),
)  # fmt: skip


def write_mutant(mutant: Mutant | None, directory: Path) -> None:
    """A copy of the sources, with the mistake."""
    shutil.copytree(library.SOURCES, directory, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    if mutant is not None:
        text = (directory / mutant.source).read_text()
        assert text.count(mutant.right) == 1, f"{mutant.right!r} occurs {text.count(mutant.right)} times"
        (directory / mutant.source).write_text(text.replace(mutant.right, mutant.wrong))


def is_seen(mutant: Mutant | None) -> bool:
    """Whether a test fails, or does not end. None: without a mistake."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_mutant(mutant, folder / "sources")
        path = os.pathsep.join([str(TESTS.parent), str(TESTS), *sys.path])
        environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": path}
        program = [sys.executable, "-W", "ignore", "-c", RUN, str(folder / "sources"), str(TESTS / "test_automaton.py")]
        try:
            ran = subprocess.run(
                program, env=environment, cwd=TESTS.parent.parent, capture_output=True, text=True, timeout=TIME_S
            )
        except subprocess.TimeoutExpired:
            return True
        assert ran.returncode != UNBUILT, ran.stdout
        assert ran.returncode <= 1, ran.stdout + ran.stderr  # less: it crashed
        return ran.returncode != 0


def main() -> int:
    missed = []
    for mutant in (None, *MUTANTS):
        right = is_seen(mutant) == (mutant is not None)
        print("ok  " if right else "MISSED", mutant or "no mistake", flush=True)
        missed += [] if right else [mutant]
    print(f"{len(MUTANTS) + 1 - len(missed)} of {len(MUTANTS) + 1} as they should be")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
