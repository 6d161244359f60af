"""The shapes of steps to capture: how many rows and tokens a graph holds at most.

A step runs in the smallest shape that holds it, and what is left over is padding. So shapes lie closer together than
padding would cost, and are few enough that capturing all of them takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from gapless.core.limits import Limits
from gapless.core.plan import Plan

FEW_TOKENS = (8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
STEPS_AN_OCTAVE = 8  # beyond: at most an eighth of a step is padding
MIXED_ROWS = (8, 32, 128)
MANY_TOKENS, MANY_ROWS = 512, 32  # steps of more tokens have no shape of fewer rows: these cost them little


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a captured step."""

    num_rows: int  # decode rows and chunks together: no more samples than that
    num_tokens: int = 0  # of all of them; 0: decode rows alone, one token each

    @property
    def has_chunks(self) -> bool:
        return self.num_tokens > 0

    @property
    def size(self) -> int:
        """Tokens that a step of this shape computes, padding included."""
        return self.num_tokens or self.num_rows

    def holds(self, plan: Plan) -> bool:
        """Whether the plan, which has chunks, fits."""
        return plan.num_decodes + len(plan.chunks) <= self.num_rows and plan.num_tokens <= self.num_tokens


def decode_shapes(limits: Limits) -> list[Shape]:
    """Every number of rows that is small, then ever wider steps, and the largest."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1024, 64), *range(1024, 65536, 256)]
    return [Shape(size) for size in sizes if size < limits.num_rows] + [Shape(limits.num_rows)]


def mixed_shapes(limits: Limits) -> list[Shape]:
    """The fewest tokens first, of these the fewest rows."""
    most = min(limits.max_batch_tokens, limits.num_rows * limits.max_model_len)
    sizes = [*takewhile(lambda size: size < most, _token_counts()), most]
    return [Shape(count, size) for size in sizes for count in _row_counts(size, limits.num_rows)]


def _row_counts(num_tokens: int, num_rows: int) -> list[int]:
    """No more than there are tokens, since each row has at least one."""
    most = min(num_tokens, num_rows)
    fewest = MANY_ROWS if num_tokens > MANY_TOKENS else 1
    return [count for count in MIXED_ROWS if fewest <= count < most] + [most]


def _token_counts() -> Iterator[int]:
    yield from FEW_TOKENS
    size = FEW_TOKENS[-1]
    while True:
        for step in range(1, STEPS_AN_OCTAVE + 1):
            yield size + size * step // STEPS_AN_OCTAVE
        size *= 2
