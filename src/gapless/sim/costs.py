"""What a step costs: seconds as a sum of few terms, fitted to measured steps by least squares.

    seconds = step + chunks? + rows + context + chunk tokens + chunk work

A step reads the weights once (step), a step with chunks takes another path (chunks?), each decode row adds work (rows)
and reads its keys and values (context, summed over rows), and a chunk adds a product for each token (chunk tokens) and
attention of each token to those before it (chunk work). No term is negative. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from gapless.core.plan import Plan
from gapless.core.request import RowTable
from gapless.errors import ConfigError

Floats = npt.NDArray[np.float64]
TERMS = ("step", "chunks", "rows", "context", "chunk_tokens", "chunk_work")
NUM_REFITS = 4
LEAST_STEPS = 20  # fewer say too little for six terms


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes, as far as its time depends on it."""

    rows: int  # that decode
    context: int  # tokens that these rows attend to, summed
    chunk_tokens: int
    chunk_work: int  # tokens that the chunks' tokens attend to, summed

    def terms(self) -> tuple[float, ...]:
        return (1.0, float(self.chunk_tokens > 0), *(float(getattr(self, f.name)) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of a real engine. The time is what a client sees between two tokens."""

    shape: StepShape
    seconds: float


@dataclass(frozen=True, slots=True)
class Costs:
    """The fitted terms, in seconds, and how far they are from the steps that they were fitted to."""

    seconds: tuple[float, ...]  # of each of TERMS
    num_steps: int
    error: float  # median of |predicted - measured| / measured
    error_p90: float

    def of(self, shape: StepShape) -> float:
        a, b, c, d, e, f = self.seconds
        fixed = a + b if shape.chunk_tokens else a
        return fixed + c * shape.rows + d * shape.context + e * shape.chunk_tokens + f * shape.chunk_work

    def work(self, shape: StepShape, fullness: float) -> float:
        """The part of the step's time that more requests could not share: a fuller step reads the weights once too."""
        return self.of(shape) - self.seconds[0] * max(1.0 - fullness, 0.0)


def shape_of(plan: Plan, rows: RowTable) -> StepShape:
    """The shape of a plan that was just made: the rows' cursors include it."""
    context = int(rows.cursor[plan.decode_rows].sum()) if plan.num_decodes else 0
    work = 0
    for chunk in plan.chunks:
        count = len(chunk.tokens)
        work += count * chunk.start + count * (count + 1) // 2
    return StepShape(plan.num_decodes, context, plan.num_chunk_tokens, work)


def fit(steps: Sequence[MeasuredStep]) -> Costs:
    """Least squares of the relative error, without negative terms; then scaled to the measured total.

    Errors are relative to the prediction, which is known only after a fit, so it is fitted again a few times. Relative
    to the measured time, a step that was fast by chance would count most. Throughput follows from the total, so the
    total must not be off although single steps are.
    """
    if len(steps) < LEAST_STEPS:
        raise ConfigError(f"{len(steps)} measured steps are too few to fit costs to; at least {LEAST_STEPS}")
    terms = np.array([step.shape.terms() for step in steps])
    times = np.array([step.seconds for step in steps])
    found = _least_squares(terms, times)
    for _ in range(NUM_REFITS):
        expected = np.maximum(terms @ found, 0.01 * times.mean())
        found = _least_squares(terms / expected[:, None], times / expected)
    found *= times.sum() / max(float((terms @ found).sum()), 1e-12)
    errors = np.abs(terms @ found / times - 1)
    return Costs(tuple(found.tolist()), len(steps), float(np.median(errors)), float(np.quantile(errors, 0.9)))


def _least_squares(terms: Floats, wanted: Floats) -> Floats:
    """The most negative term is left out until none is."""
    scale = np.maximum(np.abs(terms).max(axis=0), 1e-30)
    kept = np.flatnonzero(np.abs(terms).max(axis=0) > 0)
    found = np.zeros(terms.shape[1])
    while len(kept):
        part = np.linalg.lstsq(terms[:, kept] / scale[kept], wanted, rcond=None)[0]
        if (part >= 0).all():
            found[kept] = part / scale[kept]
            break
        kept = np.delete(kept, int(part.argmin()))
    return found
