"""Plans survive the way to other ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given

from gapless.core.plan import Chunk, Plan
from gapless.core.request import LongArray
from gapless.ranks.plan_words import plan_capacity, read_plan, write_plan
from gapless.runner.fill import capacity, fill
from plans import LIMITS, plans

NOT_SENT = {"mask_samples", "process_samples", "waits"}  # of second halves, which rank 0 has alone


def same(ours: object, theirs: object) -> bool:
    if isinstance(ours, np.ndarray):
        assert isinstance(theirs, np.ndarray)
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and bool((ours == theirs).all())
    if isinstance(ours, tuple):
        return all(same(*pair) for pair in zip(ours, theirs, strict=True))
    if dataclasses.is_dataclass(ours):
        names = [field.name for field in dataclasses.fields(ours) if field.name not in NOT_SENT]
        return all(same(getattr(ours, name), getattr(theirs, name)) for name in names)
    return ours == theirs


@given(plans())
def test_a_plan_is_the_same_on_the_other_side(plan: Plan) -> None:
    out = np.zeros(plan_capacity(LIMITS, capacity(LIMITS)), np.int32)
    found = read_plan(out[: write_plan(plan, out)].copy())
    assert same(plan, found)
    assert not found.is_split
    packed = [np.zeros(capacity(LIMITS), np.int32) for _ in range(2)]
    assert fill(plan, packed[0]) == fill(found, packed[1])
    np.testing.assert_array_equal(*packed)


def test_large_numbers() -> None:
    """Epochs and steps may be beyond 32 bits."""
    tokens = np.arange(3, dtype=np.int32)
    epochs: LongArray = np.array([2**40, 7], np.int64)
    chunk = Chunk(1, 2**41, 5, tokens, samples=True, targets=tokens[1:], scored_from=6)
    blocks = np.array([[1, 0, 3]], np.int32)
    plan = Plan(2**35, tokens[:1], (chunk,), blocks, tokens[:2], epochs, 9, needs=2**33, num_top=2)
    out = np.zeros(200, np.int32)
    assert same(plan, read_plan(out[: write_plan(plan, out)]))
