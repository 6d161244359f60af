"""Filters and draws by passes over a whole row: a Triton kernel for the few rows whose shortlist does not settle them.

One program reads the row in a fixed order, a block at a time, the next one while it works on the last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.inverse import slot_at, uniform_of
from gapless.kernels.launch import launch_dependents_and_wait
from gapless.kernels.shortlist import (
    admit,
    fetch,
    float_of,
    floor_of_min_p,
    key_of,
    look,
    num_forbidden,
    top_k_of,
    warmth_of,
    weigh,
)

UNALIGNED = ["rows", "places"]  # they may begin anywhere in a buffer, and no variant is compiled for it
UNSETTLED = tl.constexpr(-2)  # in place of a token
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite number


@triton.jit
def _limits(low, high, by_key):
    """Three limits between two logits, in equal steps of their keys or of themselves."""
    step = tl.maximum((key_of(high) - key_of(low)) // 4, 1)
    width = (high - low) * 0.25
    first = tl.where(by_key, float_of(key_of(low) + step), low + width)
    second = tl.where(by_key, float_of(key_of(low) + 2 * step), low + 2 * width)
    third = tl.where(by_key, float_of(key_of(low) + 3 * step), low + 3 * width)
    return first, second, third


@triton.jit
def _floor(
    base, stops, num_stops, top, warmth, below, wanted, by_mass,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The smallest of the largest logits that together reach `wanted`, by number or by weight from `below` up.

    It is at least `low` and less than `high`. A pass takes the amounts from three limits up, and the logits next to
    both ends. Steps of keys end for any numbers, steps of the logits themselves end sooner for most.
    """
    column = tl.arange(0, BLOCK)
    low = tl.maximum(below, LOWEST)
    high = float_of(key_of(top) + 1)
    smallest = low
    largest = high
    by_key = smallest < largest  # true
    while smallest < largest:
        first, second, third = _limits(low, high, by_key)
        sum_1 = tl.zeros([BLOCK], tl.float32)
        sum_2 = tl.zeros([BLOCK], tl.float32)
        sum_3 = tl.zeros([BLOCK], tl.float32)
        least = tl.full([BLOCK], float("inf"), tl.float32)
        most = tl.full([BLOCK], -float("inf"), tl.float32)
        fetched = fetch(base, column, VOCAB)
        for start in range(0, VOCAB, BLOCK):
            following = fetch(base, start + BLOCK + column, VOCAB)
            x = admit(fetched, start + column, stops, num_stops)
            amount = tl.where(by_mass, tl.exp((x - top) * warmth), 1.0)
            sum_1 += tl.where(x >= first, amount, 0.0)
            sum_2 += tl.where(x >= second, amount, 0.0)
            sum_3 += tl.where(x >= third, amount, 0.0)
            least = tl.minimum(least, tl.where(x >= low, x, float("inf")))
            most = tl.maximum(most, tl.where(x < high, x, -float("inf")))
            fetched = following
        smallest = tl.min(least, axis=0)
        largest = tl.max(most, axis=0)
        reached_1 = tl.sum(sum_1, axis=0) >= wanted
        reached_2 = tl.sum(sum_2, axis=0) >= wanted
        reached_3 = tl.sum(sum_3, axis=0) >= wanted
        low = tl.maximum(
            tl.where(reached_3, third, tl.where(reached_2, second, tl.where(reached_1, first, low))), smallest
        )
        high = tl.where(reached_3, high, tl.where(reached_2, third, tl.where(reached_1, second, first)))
        by_key = by_key == 0
    return tl.minimum(smallest, top)  # the likeliest token stays, however little is wanted


@triton.jit
def _mass(base, stops, num_stops, top, warmth, floor, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of all weights."""
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    fetched = fetch(base, column, VOCAB)
    for start in range(0, VOCAB, BLOCK):
        following = fetch(base, start + BLOCK + column, VOCAB)
        total += weigh(admit(fetched, start + column, stops, num_stops), top, warmth, floor)
        fetched = following
    return tl.sum(total.to(tl.float64), axis=0)


@triton.jit
def _token_at(base, stops, num_stops, top, warmth, floor, target, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The token at which the running sum of weights passes `target`."""
    column = tl.arange(0, BLOCK)
    start = tl.full([], 0, tl.int32)
    last = start  # block that weighs something, and the sum before it
    before = tl.full([], 0.0, tl.float64)
    after = before
    while (start < VOCAB) & (after <= target):
        x = look(base, start + column, stops, num_stops, VOCAB)
        mass = tl.sum(weigh(x, top, warmth, floor), axis=0).to(tl.float64)
        last = tl.where(mass > 0, start, last)
        before = tl.where(mass > 0, after, before)
        after += mass
        start += BLOCK
    x = look(base, last + column, stops, num_stops, VOCAB)
    slot, _ = slot_at(weigh(x, top, warmth, floor), target - before, BLOCK)
    return last + slot


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def pick_by_passes(
    logits, adjusted, rows, places, is_adjusted, temperatures, top_ps, min_ps, top_ks, seeds, stop_ids, min_total,
    maxima, tokens, bounds,
    VOCAB: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, NUM_STOPS: tl.constexpr,
    SEAT_WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draw the token of a row that has none yet from what top-k, then top-p, then min-p leave standing."""
    launch_dependents_and_wait(PDL)
    i = tl.program_id(0).to(tl.int64)
    if tl.load(tokens + i) == UNSETTLED:
        row = tl.load(rows + i)
        seat = row * SEAT_WORDS
        base = (logits + i * VOCAB, adjusted + i * VOCAB, tl.load(is_adjusted + seat))
        stops = stop_ids + seat
        place = tl.load(places + i)
        num_stops = num_forbidden(place, min_total + seat, stops, NUM_STOPS)
        tile = tl.arange(0, TILES)
        largest = tl.load(maxima + i * NUM_TILES + tile, mask=tile < NUM_TILES, other=-float("inf"))
        top = tl.max(largest, axis=0)
        temperature = tl.load(temperatures + seat)
        warmth = warmth_of(temperature)
        top_k = top_k_of(top_ks + seat, VOCAB)
        top_p = tl.load(top_ps + seat)
        floor = tl.full([], -float("inf"), tl.float32)
        for stage in range(2):
            by_mass = stage == 1
            if ((top_k > 0) & (by_mass == 0)) | ((top_p < 1) & by_mass):
                wanted = top_k.to(tl.float32)
                if by_mass:
                    kept = _mass(base, stops, num_stops, top, warmth, floor, VOCAB, BLOCK)
                    wanted = (kept * top_p).to(tl.float32)
                floor = _floor(base, stops, num_stops, top, warmth, floor, wanted, by_mass, VOCAB, BLOCK)
        floor = tl.maximum(floor, floor_of_min_p(top, temperature, tl.load(min_ps + seat)))
        uniform = uniform_of(tl.load(seeds + row * (SEAT_WORDS // 2)), place)
        target = uniform * _mass(base, stops, num_stops, top, warmth, floor, VOCAB, BLOCK)
        token = _token_at(base, stops, num_stops, top, warmth, floor, target, VOCAB, BLOCK)
        tl.store(tokens + i, token.to(tl.int64))
        tl.store(bounds + 2 * i + 1, floor)
