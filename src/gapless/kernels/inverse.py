"""Inverse transform sampling: the uniform number of a seed and a place, and the slot under whose share it falls."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _shift(x, BITS: tl.constexpr):
    """Logical right shift of signed numbers."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _mix(x):
    x = x + -7046029254386353131
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


@triton.jit
def uniform_of(seed, place):
    """The same number in [0, 1) as `sampler.uniform`."""
    return _shift(_mix(_mix(seed) + place), 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def slot_at(weight, target, SLOTS: tl.constexpr):
    """The first slot at which the running sum of weights [SLOTS] passes `target`, and the sum before that slot.

    A sum taken in a different order may end below the target: then the last slot that weighs something.
    """
    slot = tl.arange(0, SLOTS)
    reached = tl.cumsum(weight.to(tl.float64), axis=0)
    last = tl.max(tl.where(weight > 0, slot, 0), axis=0)
    found = tl.minimum(tl.sum((reached <= target).to(tl.int32), axis=0), last)
    return found, tl.sum(tl.where(slot == found, reached - weight, 0.0), axis=0)
