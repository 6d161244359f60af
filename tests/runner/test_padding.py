"""A padded plan says what the plan says, and the rest is the padding row's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from plans import LIMITS, plans

from gapless.core.plan import NO_COPIES, NOTHING, Plan
from gapless.runner.fill import Sections, Shape, fill
from gapless.runner.padding import pad

PADDING = LIMITS.num_rows
SHAPE = Shape(num_decodes=8, num_chunk_tokens=40, num_chunks=7)


@given(plans())
def test_every_plan_of_a_shape_packs_into_the_same_sections(plan: Plan) -> None:
    assert SHAPE.holds(plan)
    plan = replace(
        plan,
        score_samples=NOTHING,
        block_copies=NO_COPIES,
        chunks=tuple(replace(c, targets=NOTHING) for c in plan.chunks),
    )
    sections = Sections.of(pad(plan, SHAPE, PADDING))
    assert sections == SHAPE.sections(plan)
    assert (sections.num_decodes, sections.num_chunk_tokens, sections.num_chunks) == (8, 40, 7)
    assert sections.num_samples == SHAPE.num_samples == 15
    packed = np.zeros(10_000, np.int32)
    assert fill(pad(plan, SHAPE, PADDING), packed) == sections.total


@given(plans())
def test_the_samples_of_the_plan_are_where_the_shape_says(plan: Plan) -> None:
    padded = pad(plan, SHAPE, PADDING)
    count = plan.num_decodes
    assert padded.sample_rows[:count].tolist() == plan.sample_rows[:count].tolist()
    assert padded.sample_rows[SHAPE.chunk_samples(plan)].tolist() == plan.sample_rows[count:].tolist()
    real = {*range(count), *range(*SHAPE.chunk_samples(plan).indices(SHAPE.num_samples))}
    assert all(row == PADDING for i, row in enumerate(padded.sample_rows.tolist()) if i not in real)


@given(plans())
def test_chunks_keep_what_they_feed(plan: Plan) -> None:
    padded = pad(plan, SHAPE, PADDING)
    kept = {chunk.row: (chunk.start, chunk.tokens.tolist()) for chunk in padded.chunks if chunk.row != PADDING}
    assert kept == {chunk.row: (chunk.start, chunk.tokens.tolist()) for chunk in plan.chunks}


@given(plans())
def test_a_shape_holds_what_fits(plan: Plan) -> None:
    tokens = plan.num_tokens - plan.num_decodes
    exact = Shape(plan.num_decodes, tokens, len(plan.chunks) + 1)
    assert exact.holds(plan)
    assert not Shape(exact.num_decodes, tokens, len(plan.chunks)).holds(plan)
    assert not Shape(exact.num_decodes - 1, tokens, exact.num_chunks).holds(plan)
    assert not Shape(exact.num_decodes, tokens - 1, exact.num_chunks).holds(plan)
