"""The shapes of captured steps: every plan has one, and none is much too large."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.core.limits import Limits
from gapless.core.plan import Plan
from gapless.runner.ladder import LEAST_STEP, STEPS_AN_OCTAVE, Shape, corners, decode_shapes, mixed_shapes
from plans import LIMITS as PLAN_LIMITS
from plans import plans

LIMITS = Limits(num_rows=256, num_blocks=10_000, block_size=16, max_batch_tokens=8192, max_model_len=4096)


@given(st.integers(1, 300), st.integers(1, 9000), st.integers(1, 5000))
def test_the_largest_step_has_a_shape(num_rows: int, max_batch_tokens: int, max_model_len: int) -> None:
    limits = replace(LIMITS, num_rows=num_rows, max_batch_tokens=max_batch_tokens, max_model_len=max_model_len)
    shapes = mixed_shapes(limits)
    assert shapes[-1] == Shape(min(num_rows, shapes[-1].num_tokens), min(max_batch_tokens, num_rows * max_model_len))
    assert all(shape.num_rows <= min(num_rows, shape.num_tokens) for shape in shapes)
    assert len(set(shapes)) == len(shapes)
    assert decode_shapes(limits)[-1].num_rows == num_rows


@pytest.mark.parametrize("num_tokens", [300, 513, 1100, 3000, 4097, 8100])
def test_padding_is_bounded(num_tokens: int) -> None:
    """Less than a tile of the library's products, or an eighth of the step."""
    found = next(shape for shape in mixed_shapes(LIMITS) if shape.num_tokens >= num_tokens)
    assert found.num_tokens - num_tokens < max(LEAST_STEP, found.num_tokens / STEPS_AN_OCTAVE)


def test_there_are_not_too_many() -> None:
    assert len(mixed_shapes(LIMITS)) + len(decode_shapes(LIMITS)) < 110


@pytest.mark.parametrize("num_rows", [1, 5, 32, 33, 256])
def test_corners_have_every_number_of_rows_and_of_tokens(num_rows: int) -> None:
    limits = replace(LIMITS, num_rows=num_rows)
    mixes, decodes = mixed_shapes(limits), decode_shapes(limits)
    found = corners([*reversed(mixes), *decodes])
    assert found[0] == mixes[-1]  # the order stays: the largest comes first
    assert set(decodes) <= set(found) <= {*mixes, *decodes}
    assert {shape.num_tokens for shape in found} == {shape.num_tokens for shape in (*mixes, *decodes)}
    of_chunks = {shape.num_rows for shape in found if shape.has_chunks}
    assert of_chunks == {shape.num_rows for shape in mixes}
    if num_rows > 32:
        assert len(found) < len(mixes)


@given(plans())
def test_a_shape_holds_what_fits(plan: Plan) -> None:
    exact = Shape(plan.num_decodes + len(plan.chunks), plan.num_tokens)
    assert exact.holds(plan)
    assert not replace(exact, num_rows=exact.num_rows - 1).holds(plan)
    assert not replace(exact, num_tokens=exact.num_tokens - 1).holds(plan)
    assert any(shape.holds(plan) for shape in mixed_shapes(PLAN_LIMITS))


def test_the_ladder_of_decode_steps_ends_at_the_limit() -> None:
    assert [shape.num_rows for shape in decode_shapes(replace(LIMITS, num_rows=1))] == [1]
    assert [shape.num_rows for shape in decode_shapes(replace(LIMITS, num_rows=33))][-2:] == [32, 33]
    assert max(shape.num_rows for shape in decode_shapes(replace(LIMITS, num_rows=1000))) == 1000
