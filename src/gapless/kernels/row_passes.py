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
NUM_LIMITS = tl.constexpr(7)  # that one pass tries
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite number


@triton.jit
def _limits(low, high, by_key):
    """Limits between two logits, in equal steps of their keys or of themselves."""
    step = tl.maximum((key_of(high) - key_of(low)) // (NUM_LIMITS + 1), 1)
    width = (high - low) * (1 / (NUM_LIMITS + 1))
    limits = ()
    for i in tl.static_range(1, NUM_LIMITS + 1):
        limits += (tl.where(by_key, float_of(key_of(low) + i * step), low + i * width),)
    return limits


@triton.jit
def _sums_from(
    limits, low, high, base, stops, num_stops, top, warmth, by_mass, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """One pass: the amounts from each limit up, the smallest logit from `low` up, and the largest below `high`."""
    column = tl.arange(0, BLOCK)
    sums = ()
    for _ in tl.static_range(NUM_LIMITS):
        sums += (tl.zeros([BLOCK], tl.float32),)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    most = tl.full([BLOCK], -float("inf"), tl.float32)
    fetched = fetch(base, column, VOCAB)
    for start in range(0, VOCAB, BLOCK):
        following = fetch(base, start + BLOCK + column, VOCAB)
        x = admit(fetched, start + column, stops, num_stops)
        amount = tl.where(by_mass, tl.exp((x - top) * warmth), 1.0)
        grown = ()
        for i in tl.static_range(NUM_LIMITS):
            grown += (sums[i] + tl.where(x >= limits[i], amount, 0.0),)
        sums = grown
        least = tl.minimum(least, tl.where(x >= low, x, float("inf")))
        most = tl.maximum(most, tl.where(x < high, x, -float("inf")))
        fetched = following
    return sums, tl.min(least, axis=0), tl.max(most, axis=0)


@triton.jit
def _floor(base, stops, num_stops, top, warmth, below, wanted, by_mass, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest of the largest logits that together reach `wanted`, by number or by weight from `below` up.

    It is at least `low` and less than `high`, which each pass brings closer. Steps of keys come to an end for any
    numbers, steps of the logits themselves sooner for most.
    """
    low = tl.maximum(below, LOWEST)
    high = float_of(key_of(top) + 1)
    smallest = low
    largest = high
    by_key = smallest < largest  # true
    while smallest < largest:
        limits = _limits(low, high, by_key)
        sums, smallest, largest = _sums_from(
            limits, low, high, base, stops, num_stops, top, warmth, by_mass, VOCAB, BLOCK
        )
        low = tl.maximum(low, smallest)
        for i in tl.static_range(NUM_LIMITS):
            is_reached = tl.sum(sums[i], axis=0) >= wanted
            low = tl.where(is_reached, tl.maximum(low, limits[i]), low)
            high = tl.where(is_reached, high, tl.minimum(high, limits[i]))
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
    logits, rows, places, temperatures, top_ps, min_ps, top_ks, seeds, stop_ids, min_total, maxima, sums, tokens,
    VOCAB: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, NUM_STOPS: tl.constexpr,
    SEAT_WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draw the token of a row that has none yet from what top-k, then top-p, then min-p leave standing."""
    launch_dependents_and_wait(PDL)
    i = tl.program_id(0).to(tl.int64)
    if tl.load(tokens + i) == UNSETTLED:
        row = tl.load(rows + i)
        seat = row * SEAT_WORDS
        base = logits + i * VOCAB
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
        total = tl.full([], 0.0, tl.float64)  # mass of what top-k keeps
        if top_k == 0:
            mass = tl.load(sums + i * NUM_TILES + tile, mask=tile < NUM_TILES, other=0.0)
            total = tl.sum((mass * tl.exp((largest - top) * warmth)).to(tl.float64), axis=0)
        floor = tl.full([], -float("inf"), tl.float32)
        for stage in range(2):
            by_mass = stage == 1
            if ((top_k > 0) & (by_mass == 0)) | ((top_p < 1) & by_mass):
                wanted = top_k.to(tl.float32)
                if by_mass:
                    if top_k > 0:
                        total = _mass(base, stops, num_stops, top, warmth, floor, VOCAB, BLOCK)
                    wanted = (total * top_p).to(tl.float32)
                floor = _floor(base, stops, num_stops, top, warmth, floor, wanted, by_mass, VOCAB, BLOCK)
        floor = tl.maximum(floor, floor_of_min_p(top, temperature, tl.load(min_ps + seat)))
        uniform = uniform_of(tl.load(seeds + row * (SEAT_WORDS // 2)), place)
        target = uniform * _mass(base, stops, num_stops, top, warmth, floor, VOCAB, BLOCK)
        token = _token_at(base, stops, num_stops, top, warmth, floor, target, VOCAB, BLOCK)
        tl.store(tokens + i, token.to(tl.int64))
