"""Writes programs for native/automaton.cpp: regular languages of bytes.

An instruction is three numbers: what it does, and two operands. Knows no schemas: guides/json_programs.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

BYTE, SPLIT, JUMP, STRING, SPACE, COUNT, GATE, MATCH = range(8)  # automaton.cpp has the same list
UNBOUNDED = -1
MAX_INSTRUCTIONS = 20_000

Fragment = Callable[[], object]


class NoProgram(Exception):
    """The shape is not one of those that have a program."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a text may look like."""

    code: npt.NDArray[np.int32]  # [n, 3]
    num_counted: int = 0  # commas that an array must have which is too long to be written out


class Writer:
    """Appends instructions. Each method writes one part of the language; the next part is written behind it."""

    def __init__(self) -> None:
        self.code: list[list[int]] = []

    def put(self, op: int, a: int = 0, b: int = 0) -> int:
        """Returns its place. Where a jump leads may be said later, by `land`."""
        if len(self.code) >= MAX_INSTRUCTIONS:
            raise NoProgram
        self.code.append([op, a, b])
        return len(self.code) - 1

    def put_space(self) -> None:
        self.put(SPACE)

    def land(self, places: Sequence[int]) -> None:
        """Jumps, and forks that pass something by, lead here."""
        for place in places:
            self.code[place][2 if self.code[place][0] == SPLIT else 1] = len(self.code)

    def fork(self) -> int:
        """Two ways: what is written next, and one that passes it by and lands later."""
        return self.put(SPLIT, len(self.code) + 1)

    def text(self, text: str) -> None:
        for byte in text.encode():
            self.put(BYTE, byte, byte)

    def any_byte(self, *spans: str) -> None:
        """One byte of these spans, each written as its two ends."""
        self.one_of([partial(self.put, BYTE, ord(span[0]), ord(span[1])) for span in spans])

    def digits(self, fewest: int = 0, most: int | None = None) -> None:
        self.repeat(lambda: self.any_byte("09"), fewest, most)

    def one_of(self, parts: Sequence[Fragment]) -> None:
        if not parts:
            raise NoProgram
        ends = []
        for part in parts[:-1]:
            fork = self.fork()
            part()
            ends.append(self.put(JUMP))
            self.land([fork])
        parts[-1]()
        self.land(ends)

    def maybe(self, part: Fragment) -> None:
        self.repeat(part, 0, 1)

    def repeat(self, part: Fragment, fewest: int = 0, most: int | None = None) -> None:
        for _ in range(fewest):
            part()
        if most is None:
            fork = self.fork()
            part()
            self.put(JUMP, fork)
            self.land([fork])
            return
        forks = []
        for _ in range(most - fewest):
            forks.append(self.fork())
            part()
        self.land(forks)
