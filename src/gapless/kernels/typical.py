"""Typical-p: how far from the entropy a row's tokens may lie that together have a share of the probability.

One program reads a row a few times. A pass measures the mass within seven distances between two known ones, of which
the farther is enough and the nearer too little. The tokens between them that a pass finds are listed. As soon as the
list has room for all of them it settles the rest. `processors.keep_typical` has the same meaning in torch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.shortlist import float_of, key_of, look

ROOM = 1024  # tokens on the list
LARGEST = tl.constexpr(3.4028234663852886e38)  # finite number
DOUBLED = tl.constexpr(0)  # ways to choose distances, in this order, the last two in turn
EVEN = tl.constexpr(1)
BY_KEY = tl.constexpr(2)


@triton.jit
def _information(base, column, stops, num_stops, top, floor, VOCAB: tl.constexpr):
    """Of these columns logit - top, the weight, and whether the token is the row's to choose; if not, 0 and 0."""
    x = look(base, column, stops, num_stops, VOCAB)
    is_kept = (x >= floor) & (x > -float("inf"))
    below = tl.where(is_kept, x - top, 0.0)
    return below, tl.where(is_kept, tl.exp(below), 0.0), is_kept


@triton.jit
def _mean(base, stops, num_stops, top, floor, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of all weights, and the mean of logit - top by weight, from which entropy differs by the same number."""
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        below, weight, _ = _information(base, column, stops, num_stops, top, floor, VOCAB)
        total += weight
        moment += weight * below
    mass = tl.sum(total.to(tl.float64), axis=0)
    return mass, (tl.sum(moment.to(tl.float64), axis=0) / mass).to(tl.float32)


@triton.jit
def _distance(low, high, k, way):
    """The k-th of seven distances between two, which for k = 0 and 8 it gives itself."""
    first = tl.where(low < 0, key_of(low * 0.0) - 1, key_of(low))
    step = tl.maximum((key_of(high) - first) // 8, 1)
    by_key = float_of(tl.minimum(first + k * step, key_of(high)))
    even = tl.maximum(low, 0.0) + (high - tl.maximum(low, 0.0)) * (k * 0.125)
    between = tl.where(way == BY_KEY, by_key, tl.where(way == EVEN, even, tl.exp2(k * 1.0) * 0.125))
    return tl.where(k == 0, low, tl.where(k == 8, high, tl.minimum(between, high)))


@triton.jit
def _list(distance, weight, is_here, count, listed, BLOCK: tl.constexpr, ROOM: tl.constexpr):
    """Add tokens of a block to the list while it has room; return how many there are."""
    number = is_here.to(tl.int32)
    found = tl.sum(number, axis=0)
    if (found > 0) & (count + found <= ROOM):
        place = count + tl.cumsum(number, axis=0) - 1
        tl.store(listed + place, distance, mask=is_here)
        tl.store(listed + ROOM + place, weight, mask=is_here)
    return count + found


@triton.jit
def _pass(
    base, stops, num_stops, top, floor, mean, low, high, way, listed,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The mass within each of seven distances; of tokens from `low` to `high` the nearest, the farthest, the number."""
    d_1, d_2, d_3 = _distance(low, high, 1, way), _distance(low, high, 2, way), _distance(low, high, 3, way)
    d_4, d_5, d_6 = _distance(low, high, 4, way), _distance(low, high, 5, way), _distance(low, high, 6, way)
    d_7 = _distance(low, high, 7, way)
    sum_1 = tl.zeros([BLOCK], tl.float32)
    sum_2 = tl.zeros([BLOCK], tl.float32)
    sum_3 = tl.zeros([BLOCK], tl.float32)
    sum_4 = tl.zeros([BLOCK], tl.float32)
    sum_5 = tl.zeros([BLOCK], tl.float32)
    sum_6 = tl.zeros([BLOCK], tl.float32)
    sum_7 = tl.zeros([BLOCK], tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    most = tl.full([BLOCK], -1.0, tl.float32)
    count = tl.full([], 0, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        below, weight, is_kept = _information(base, column, stops, num_stops, top, floor, VOCAB)
        distance = tl.abs(below - mean)
        sum_1 += tl.where(distance <= d_1, weight, 0.0)
        sum_2 += tl.where(distance <= d_2, weight, 0.0)
        sum_3 += tl.where(distance <= d_3, weight, 0.0)
        sum_4 += tl.where(distance <= d_4, weight, 0.0)
        sum_5 += tl.where(distance <= d_5, weight, 0.0)
        sum_6 += tl.where(distance <= d_6, weight, 0.0)
        sum_7 += tl.where(distance <= d_7, weight, 0.0)
        is_here = is_kept & (distance > low) & (distance <= high)
        least = tl.minimum(least, tl.where(is_here, distance, float("inf")))
        most = tl.maximum(most, tl.where(is_here, distance, -1.0))
        if count <= ROOM:
            count = _list(distance, weight, is_here, count, listed, BLOCK, ROOM)
    masses = (
        tl.sum(sum_1, axis=0), tl.sum(sum_2, axis=0), tl.sum(sum_3, axis=0), tl.sum(sum_4, axis=0),
        tl.sum(sum_5, axis=0), tl.sum(sum_6, axis=0), tl.sum(sum_7, axis=0),
    )  # fmt: skip
    return masses, tl.min(least, axis=0), tl.max(most, axis=0), count


@triton.jit
def _settle(low, high, before, wanted, count, listed, ROOM: tl.constexpr):
    """The smallest distance that is enough, from the list of all tokens from `low` to `high`."""
    slot = tl.arange(0, ROOM)
    distance = tl.load(listed + slot, mask=slot < count, other=float("inf"))
    weight = tl.load(listed + ROOM + slot, mask=slot < count, other=0.0)
    too_little = tl.where(low < 0, key_of(low * 0.0) - 1, key_of(low))
    enough = key_of(high)
    while too_little + 1 < enough:
        middle = too_little + (enough - too_little) // 2
        is_enough = before + tl.sum(tl.where(distance <= float_of(middle), weight, 0.0), axis=0) >= wanted
        enough = tl.where(is_enough, middle, enough)
        too_little = tl.where(is_enough, too_little, middle)
    return float_of(enough)


@triton.jit
def typical(
    base, stops, num_stops, top, floor, share, listed, VOCAB: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr
):  # fmt: skip
    """The mean of logit - top by probability, and how far from it the logits may lie that together have `share`.

    A token's information lies as far from the entropy as its logit from that mean. listed: [2, ROOM], memory.
    """
    mass, mean = _mean(base, stops, num_stops, top, floor, VOCAB, BLOCK)
    wanted = tl.maximum((mass * share).to(tl.float32), 1e-30)  # one token at least
    low = mean * 0.0 - 1.0
    high = mean * 0.0 + LARGEST
    before = mean * 0.0  # the mass within `low`
    farthest = high
    way = tl.full([], DOUBLED, tl.int32)
    is_open = high > low
    while is_open:
        masses, least, most, count = _pass(
            base, stops, num_stops, top, floor, mean, low, high, way, listed, VOCAB, BLOCK, ROOM
        )  # fmt: skip
        if count <= ROOM:
            tl.debug_barrier()
            farthest = _settle(low, tl.minimum(high, most), before, wanted, count, listed, ROOM)
            is_open = high < low
        else:
            within = tl.full([], 0, tl.int32)  # of the seven, how many are too little
            for k in tl.static_range(7):
                is_little = masses[k] < wanted
                within += is_little.to(tl.int32)
                before = tl.where(is_little, masses[k], before)
            near = _distance(low, high, within, way)
            high = tl.minimum(_distance(low, high, within + 1, way), most)
            low = tl.where(near < least, tl.where(least > 0, float_of(key_of(least) - 1), near), near)
            farthest = high
            is_open = tl.where(low < 0, key_of(high * 0.0) - 1, key_of(low)) + 1 < key_of(high)
            way = tl.where(way == EVEN, BY_KEY, EVEN)
    return mean, farthest
