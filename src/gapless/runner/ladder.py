"""The shapes of steps to capture: how many rows and tokens a graph holds at most.

A step runs in the smallest shape that holds it, and what is left over is padding. So shapes lie closer together than
padding would cost, and are few enough that capturing all of them takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from gapless.core.limits import Limits
from gapless.core.plan import Plan

FEW_TOKENS = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)
STEPS_AN_OCTAVE = 8  # beyond: at most an eighth of a step is padding, or fewer tokens than
LEAST_STEP = 128  # which is what the library's tiles have: a step of fewer takes as long
MIXED_ROWS = (32,)  # keys of few decode rows are split among programs; apart from that, rows cost a step little


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


def corners(shapes: Sequence[Shape]) -> list[Shape]:
    """Of the shapes with chunks, one for each number of tokens and one for each number of rows; all others.

    No kernel and no product depends on both numbers, so these launch all that the others do.
    """
    most = {shape.num_tokens: shape for shape in sorted(shapes, key=lambda shape: shape.num_rows)}
    least = {shape.num_rows: shape for shape in sorted(shapes, key=lambda shape: -shape.num_tokens) if shape.has_chunks}
    some = {*most.values(), *least.values()}
    return [shape for shape in shapes if shape in some or not shape.has_chunks]


def _row_counts(num_tokens: int, num_rows: int) -> list[int]:
    """No more than there are tokens, since each row has at least one."""
    most = min(num_tokens, num_rows)
    return [count for count in MIXED_ROWS if count < most] + [most]


def _token_counts() -> Iterator[int]:
    yield from FEW_TOKENS
    size = FEW_TOKENS[-1]
    while True:
        step = max(size // STEPS_AN_OCTAVE, min(LEAST_STEP, size))
        yield from range(size + step, 2 * size + 1, step)
        size *= 2
