"""The sampler for NVIDIA GPUs, as one Triton program for each row: greedy, drawn, filtered, without a sort.

The same meaning as `sampler.sample`, which is its oracle in tests. A filter keeps every token from some logit up; that
logit is found digit by digit: each pass over the row says, for three candidates at once, how many tokens (or how
much probability) stand at or above it. One program reads one row in a fixed order, so a row's token depends on nothing
else in the batch, and all of it can be captured in a graph. Runs under Triton's interpreter too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from gapless.core.params import MAX_STOP_IDS
from gapless.core.plan import NO_SAMPLE
from gapless.core.row_fields import SEAT_WORDS

DIGIT_BITS = 2  # of a key, settled by one pass


@triton.jit
def _forbid(
    logits, rows, places, stop_ids, min_total, VOCAB: tl.constexpr, NUM_STOPS: tl.constexpr, SEAT_WORDS: tl.constexpr
):
    """Put the stop tokens of a row that may not end yet out of reach."""
    i = tl.program_id(0).to(tl.int64)
    seat = tl.load(rows + i) * SEAT_WORDS
    stop = tl.load(stop_ids + seat + tl.arange(0, NUM_STOPS))
    if tl.load(places + i) + 1 < tl.load(min_total + seat):
        tl.store(logits + i * VOCAB + stop, -float("inf"), mask=stop >= 0)


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
def _uniform(seed, place):
    """The same number in [0, 1) as `sampler.uniform`."""
    return _shift(_mix(_mix(seed) + place), 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _load(base, column, VOCAB: tl.constexpr, KEY_BITS: tl.constexpr):
    """Logits, as precise as keys of so many bits."""
    x = tl.load(base + column, mask=column < VOCAB, other=-float("inf")).to(tl.float32)
    return _rounded(x, KEY_BITS)


@triton.jit
def _rounded(x, KEY_BITS: tl.constexpr):
    """To bfloat16, half to even, as float32: by hand, since the interpreter's conversion cuts off."""
    if KEY_BITS == 16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def _key(x, KEY_BITS: tl.constexpr):
    """Whole numbers in the order of the logits; 16 bits tell bfloat16 numbers apart."""
    bits = x.to(tl.uint32, bitcast=True)
    ordered = bits ^ tl.where(bits >> 31 == 1, 0xFFFFFFFF, 0x80000000).to(tl.uint32)
    return ordered >> (32 - KEY_BITS)


@triton.jit
def _weight(x, key, top, warmth, floor_key, floor):
    """Unnormalized probability of what the filters left standing."""
    return tl.where((key >= floor_key) & (x >= floor), tl.exp((x - top) * warmth), 0.0)


@triton.jit
def _largest(base, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit and the first place it has; NaN counts as nothing."""
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    place = tl.full([BLOCK], VOCAB - 1, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = _load(base, column, VOCAB, 32)
        place = tl.where(x > best, column, place)
        best = tl.where(x > best, x, best)
    top = tl.max(best, axis=0)
    return top, tl.min(tl.where(best == top, place, VOCAB - 1), axis=0)


@triton.jit
def _lowest_key(
    base, top, warmth, floor_key, wanted,
    BY_MASS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, KEY_BITS: tl.constexpr, DIGIT_BITS: tl.constexpr,
):  # fmt: skip
    """The largest key such that the tokens at or above it are at least `wanted`, by count or by probability."""
    found = tl.full([], 0, tl.uint32)
    unit = tl.full([], 1 << (KEY_BITS - DIGIT_BITS), tl.uint32)  # of the digit that is looked for
    for _ in range(KEY_BITS // DIGIT_BITS):
        sum_1 = tl.zeros([BLOCK], tl.float32)
        sum_2 = tl.zeros([BLOCK], tl.float32)
        sum_3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, VOCAB, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = _load(base, column, VOCAB, KEY_BITS)
            key = _key(x, KEY_BITS)
            amount = (column < VOCAB).to(tl.float32)
            if BY_MASS:
                amount = _weight(x, key, top, warmth, floor_key, -float("inf"))
            sum_1 += tl.where(key >= found + unit, amount, 0.0)
            sum_2 += tl.where(key >= found + 2 * unit, amount, 0.0)
            sum_3 += tl.where(key >= found + 3 * unit, amount, 0.0)
        enough = (tl.sum(sum_1, axis=0) >= wanted).to(tl.uint32)
        enough += (tl.sum(sum_2, axis=0) >= wanted).to(tl.uint32)
        enough += (tl.sum(sum_3, axis=0) >= wanted).to(tl.uint32)
        found += enough * unit
        unit = unit >> DIGIT_BITS
    return found


@triton.jit
def _mass(base, top, warmth, floor_key, floor, VOCAB: tl.constexpr, BLOCK: tl.constexpr, KEY_BITS: tl.constexpr):
    """Sum of all weights."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, VOCAB, BLOCK):
        x = _load(base, start + tl.arange(0, BLOCK), VOCAB, KEY_BITS)
        total += tl.sum(_weight(x, _key(x, KEY_BITS), top, warmth, floor_key, floor), axis=0).to(tl.float64)
    return total


@triton.jit
def _pick(
    logits, rows, places, temperatures, top_p, min_p, top_k, seed, tokens,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, KEY_BITS: tl.constexpr, DIGIT_BITS: tl.constexpr,
    NO_SAMPLE: tl.constexpr, SEAT_WORDS: tl.constexpr,
):  # fmt: skip
    """The next token of one row; NO_SAMPLE where its largest logit is not finite."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    seat = row * SEAT_WORDS
    base = logits + i * VOCAB
    temperature = tl.load(temperatures + seat)
    top, token = _largest(base, VOCAB, BLOCK)
    fine = (top > -float("inf")) & (top < float("inf"))
    count = tl.load(top_k + seat)
    if (temperature > 0) & (count != 1):
        top = _rounded(top, KEY_BITS)
        warmth = 1.0 / temperature
        floor = top + temperature * tl.log(tl.load(min_p + seat))  # of min-p; log 0 is -inf: none
        floor_key = tl.full([], 0, tl.uint32)
        if (count > 0) & (count < VOCAB):
            wanted = count.to(tl.float32)
            floor_key = _lowest_key(base, top, warmth, floor_key, wanted, False, VOCAB, BLOCK, KEY_BITS, DIGIT_BITS)
        share = tl.load(top_p + seat)
        if share < 1:
            kept = _mass(base, top, warmth, floor_key, -float("inf"), VOCAB, BLOCK, KEY_BITS)
            wanted = (kept * share).to(tl.float32)
            floor_key = _lowest_key(base, top, warmth, floor_key, wanted, True, VOCAB, BLOCK, KEY_BITS, DIGIT_BITS)
        target = _mass(base, top, warmth, floor_key, floor, VOCAB, BLOCK, KEY_BITS)
        target = target * _uniform(tl.load(seed + row * (SEAT_WORDS // 2)), tl.load(places + i))
        before = tl.full([], 0.0, tl.float64)
        for start in range(0, VOCAB, BLOCK):
            x = _load(base, start + tl.arange(0, BLOCK), VOCAB, KEY_BITS)
            weight = _weight(x, _key(x, KEY_BITS), top, warmth, floor_key, floor)
            after = before + tl.sum(weight, axis=0).to(tl.float64)
            if (before <= target) & (target < after):
                reached = before + tl.cumsum(weight, axis=0).to(tl.float64)
                place = start + tl.sum((reached <= target).to(tl.int32), axis=0)
                token = tl.minimum(place, VOCAB - 1)
            before = after
    tl.store(tokens + i, tl.where(fine, token, NO_SAMPLE).to(tl.int64))


def forbid_stops(
    logits: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, fields: Mapping[str, torch.Tensor]
) -> None:
    """Overwrite the logits of stop tokens in rows that may not end yet."""
    num_rows, vocab = logits.shape
    _forbid[(num_rows,)](
        logits, rows, places, fields["stop_ids"], fields["min_total"],
        VOCAB=vocab, NUM_STOPS=MAX_STOP_IDS, SEAT_WORDS=SEAT_WORDS, num_warps=1,
    )  # fmt: skip


def draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    fields: Mapping[str, torch.Tensor],
    *,
    key_bits: int,
    block: int,
) -> torch.Tensor:
    """Tokens [n] int64 for logits [n, vocab] of rows [n], which will have these places [n].

    fields: of all rows, as views of their seats.
    """
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    drawn = (fields[name] for name in ("temperature", "top_p", "min_p", "top_k", "seed"))
    _pick[(num_rows,)](
        logits, rows, places, *drawn, tokens,
        VOCAB=vocab, BLOCK=min(block, triton.next_power_of_2(vocab)),
        KEY_BITS=key_bits, DIGIT_BITS=DIGIT_BITS, NO_SAMPLE=NO_SAMPLE, SEAT_WORDS=SEAT_WORDS, num_warps=8,
    )  # fmt: skip
    return tokens
