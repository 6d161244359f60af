"""The sampler for NVIDIA GPUs: greedy, drawn, filtered, without a sort, in two Triton kernels.

The same meaning as `sampler.sample`, which is its oracle in tests. The first kernel surveys the logits
(kernels/shortlist.py), the second picks a token, one program a row. A filter keeps every token from some logit up, and
that logit is among the largest: the program compares each logit of the shortlist with each other one, which tells how
many are larger and how much they weigh. A row without filters needs no shortlist: the sums of its tiles say in which
tile the token is. Only a filter that keeps more tokens than the shortlist has room for reads the whole row again.
Both kernels can be captured in a graph, and run under Triton's interpreter too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from gapless.core.params import MAX_STOP_IDS
from gapless.core.plan import NO_SAMPLE
from gapless.core.row_fields import SEAT_WORDS
from gapless.kernels.launch import launch_dependents_and_wait, pdl
from gapless.kernels.shortlist import (
    SIZES,
    Figures,
    ShortlistSizes,
    key_of,
    limit_for,
    list_from,
    load_list,
    look,
    sum_tiles,
    survey_columns,
)

COLDEST = tl.constexpr(1e-30)  # a lower temperature is as good as this one, and its inverse may not be a number


@triton.jit
def _survey(
    logits, rows, places, temperatures, stop_ids, min_total, maxima, sums,
    VOCAB: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, NUM_TILES: tl.constexpr, NUM_STOPS: tl.constexpr,
    SEAT_WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The figures of some tiles of one row: sums only where a token will be drawn."""
    launch_dependents_and_wait(PDL)
    i = tl.program_id(0).to(tl.int64)
    seat = tl.load(rows + i) * SEAT_WORDS
    is_early = tl.load(places + i) + 1 < tl.load(min_total + seat)
    tile, column = survey_columns(TILE, SPAN)
    x = look(logits + i * VOCAB, column, stop_ids + seat, is_early, VOCAB, NUM_STOPS)
    largest = tl.max(x, axis=1)
    tl.store(maxima + i * NUM_TILES + tile, largest, mask=tile < NUM_TILES)
    temperature = tl.load(temperatures + seat)
    if temperature > 0:
        total = sum_tiles(x, largest, 1.0 / tl.maximum(temperature, COLDEST))
        tl.store(sums + i * NUM_TILES + tile, total, mask=tile < NUM_TILES)


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
def _slot_at(weight, target, SLOTS: tl.constexpr):
    """The first slot at which the running sum of weights [SLOTS] passes `target`, and the sum before that slot.

    A sum taken in a different order may end below the target: then the last slot that weighs something.
    """
    slot = tl.arange(0, SLOTS)
    reached = tl.cumsum(weight.to(tl.float64), axis=0)
    last = tl.max(tl.where(weight > 0, slot, 0), axis=0)
    found = tl.minimum(tl.sum((reached <= target).to(tl.int32), axis=0), last)
    return found, tl.sum(tl.where(slot == found, reached - weight, 0.0), axis=0)


@triton.jit
def _compare(values, x, count, top, warmth, ROOM: tl.constexpr):
    """How many of the shortlist are larger than each of it [ROOM], and how much those weigh."""
    larger = tl.zeros([ROOM], tl.int32)
    mass = tl.zeros([ROOM], tl.float32)
    for start in range(0, count, 8):
        for i in tl.static_range(8):
            other = tl.load(values + start + i, mask=start + i < count, other=-float("inf"))
            is_larger = other > x
            larger += is_larger.to(tl.int32)
            mass += tl.where(is_larger, tl.exp((other - top) * warmth), 0.0)
    return larger, mass


@triton.jit
def _weight(x, top, warmth, floor_key, floor):
    """Unnormalized probability of what the filters left standing."""
    return tl.where((key_of(x) >= floor_key) & (x >= floor), tl.exp((x - top) * warmth), 0.0)


@triton.jit
def _lowest_key(
    base, stops, is_early, top, warmth, floor_key, wanted,
    BY_MASS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, NUM_STOPS: tl.constexpr,
):  # fmt: skip
    """The largest key such that the tokens at or above it are at least `wanted`, by count or by probability.

    Two bits of the key by each pass over the row.
    """
    found = tl.full([], 0, tl.uint32)
    unit = tl.full([], 1 << 30, tl.uint32)  # of the digit that is looked for
    for _ in range(16):
        sum_1 = tl.zeros([BLOCK], tl.float32)
        sum_2 = tl.zeros([BLOCK], tl.float32)
        sum_3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, VOCAB, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = look(base, column, stops, is_early, VOCAB, NUM_STOPS)
            key = key_of(x)
            amount = (column < VOCAB).to(tl.float32)
            if BY_MASS:
                amount = _weight(x, top, warmth, floor_key, -float("inf"))
            sum_1 += tl.where(key >= found + unit, amount, 0.0)
            sum_2 += tl.where(key >= found + 2 * unit, amount, 0.0)
            sum_3 += tl.where(key >= found + 3 * unit, amount, 0.0)
        enough = (tl.sum(sum_1, axis=0) >= wanted).to(tl.uint32)
        enough += (tl.sum(sum_2, axis=0) >= wanted).to(tl.uint32)
        enough += (tl.sum(sum_3, axis=0) >= wanted).to(tl.uint32)
        found += enough * unit
        unit = unit >> 2
    return found


@triton.jit
def _mass(
    base, stops, is_early, top, warmth, floor_key, floor,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, NUM_STOPS: tl.constexpr,
):  # fmt: skip
    """Sum of all weights."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, VOCAB, BLOCK):
        x = look(base, start + tl.arange(0, BLOCK), stops, is_early, VOCAB, NUM_STOPS)
        total += tl.sum(_weight(x, top, warmth, floor_key, floor), axis=0).to(tl.float64)
    return total


@triton.jit
def _draw_from_row(
    base, stops, is_early, top, token, warmth, floor, top_k, top_p, uniform,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, NUM_STOPS: tl.constexpr,
):  # fmt: skip
    """The same by passes over the whole row, for filters that keep more than a shortlist holds."""
    floor_key = tl.full([], 0, tl.uint32)
    if (top_k > 0) & (top_k < VOCAB):
        wanted = top_k.to(tl.float32)
        floor_key = _lowest_key(base, stops, is_early, top, warmth, floor_key, wanted, False, VOCAB, BLOCK, NUM_STOPS)
    if top_p < 1:
        kept = _mass(base, stops, is_early, top, warmth, floor_key, -float("inf"), VOCAB, BLOCK, NUM_STOPS)
        wanted = (kept * top_p).to(tl.float32)
        floor_key = _lowest_key(base, stops, is_early, top, warmth, floor_key, wanted, True, VOCAB, BLOCK, NUM_STOPS)
    target = uniform * _mass(base, stops, is_early, top, warmth, floor_key, floor, VOCAB, BLOCK, NUM_STOPS)
    before = tl.full([], 0.0, tl.float64)
    for start in range(0, VOCAB, BLOCK):
        x = look(base, start + tl.arange(0, BLOCK), stops, is_early, VOCAB, NUM_STOPS)
        weight = _weight(x, top, warmth, floor_key, floor)
        after = before + tl.sum(weight, axis=0).to(tl.float64)
        if (before <= target) & (target < after):
            slot, _ = _slot_at(weight, target - before, BLOCK)
            token = start + slot
        before = after
    return token


@triton.jit
def _pick(
    logits, rows, places, temperatures, top_ps, min_ps, top_ks, seeds, stop_ids, min_total,
    maxima, sums, near, values, ids, tokens,
    VOCAB: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr,
    FIRST: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr, NUM_STOPS: tl.constexpr,
    NO_SAMPLE: tl.constexpr, SEAT_WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The next token of one row; NO_SAMPLE where its largest logit is not finite."""
    launch_dependents_and_wait(PDL)
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    seat = row * SEAT_WORDS
    base = logits + i * VOCAB
    stops = stop_ids + seat
    place = tl.load(places + i)
    is_early = place + 1 < tl.load(min_total + seat)
    tile = tl.arange(0, TILES)
    here = tile < NUM_TILES
    largest = tl.load(maxima + i * NUM_TILES + tile, mask=here, other=-float("inf"))
    top = tl.max(largest, axis=0)
    is_fine = (top > -float("inf")) & (top < float("inf"))
    temperature = tl.load(temperatures + seat)
    token = tl.full([], NO_SAMPLE, tl.int32)
    if is_fine & (temperature == 0):
        first = tl.min(tl.where(largest == top, tile, TILES), axis=0) * TILE
        column = first + tl.arange(0, TILE)
        x = look(base, column, stops, is_early, VOCAB, NUM_STOPS)
        token = tl.min(tl.where(x == top, column, VOCAB - 1), axis=0)
    if is_fine & (temperature > 0):
        warmth = 1.0 / tl.maximum(temperature, COLDEST)
        top_k = tl.load(top_ks + seat)
        top_p = tl.load(top_ps + seat)
        floor = top + temperature * tl.log(tl.load(min_ps + seat))  # of min-p; log 0 is -inf: none
        uniform = _uniform(tl.load(seeds + row * (SEAT_WORDS // 2)), place)
        has_k = (top_k > 0) & (top_k < VOCAB)
        most = tl.where(has_k, top_k, VOCAB)
        mass = tl.load(sums + i * NUM_TILES + tile, mask=here, other=0.0) * tl.exp((largest - top) * warmth)
        total = tl.sum(mass.to(tl.float64), axis=0)
        if has_k | (top_p < 1) | (floor > -float("inf")):
            values += i * ROOM
            ids += i * ROOM
            least = tl.where(has_k, tl.maximum(top_k, FIRST), FIRST)
            count = least * 0
            is_enough = least < 0
            while (least <= ROOM) & (is_enough == 0):
                limit = limit_for(largest, top, least)
                count = list_from(
                    limit, base, largest, near + i * NUM_TILES, values, ids, stops, is_early,
                    VOCAB, TILE, NUM_TILES, TILES, CHUNK, ROOM, NUM_STOPS,
                )  # fmt: skip
                x, _ = load_list(values, ids, count, ROOM)
                listed = tl.sum(tl.exp((x - top) * warmth), axis=0)
                is_enough = tl.where(has_k, count >= top_k, (floor >= limit) | (top_p < 1) & (listed >= top_p * total))
                is_enough = (count <= ROOM) & (is_enough | (limit == -float("inf")))
                least = tl.where(count <= ROOM, 4 * least, ROOM + 1)
            if is_enough:
                x, listed_ids = load_list(values, ids, count, ROOM)
                larger, above = _compare(values, x, count, top, warmth, ROOM)
                weight = tl.where(larger < most, tl.exp((x - top) * warmth), 0.0)
                share = tl.where(has_k, tl.sum(weight, axis=0), total.to(tl.float32)) * top_p
                share = tl.where(top_p < 1, share, float("inf"))
                weight = tl.where((larger == 0) | (above < share) & (x >= floor), weight, 0.0)
                slot, _ = _slot_at(weight, uniform * tl.sum(weight.to(tl.float64), axis=0), ROOM)
                token = tl.sum(tl.where(tl.arange(0, ROOM) == slot, listed_ids, 0), axis=0)
            else:
                token = _draw_from_row(
                    base, stops, is_early, top, token, warmth, floor, top_k, top_p, uniform, VOCAB, BLOCK, NUM_STOPS
                )
        else:
            target = uniform * total
            slot, before = _slot_at(mass, target, TILES)
            x = look(base, slot * TILE + tl.arange(0, TILE), stops, is_early, VOCAB, NUM_STOPS)
            inner, _ = _slot_at(tl.exp((x - top) * warmth), target - before, TILE)
            token = slot * TILE + inner
    tl.store(tokens + i, token.to(tl.int64))


def draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    fields: Mapping[str, torch.Tensor],
    sizes: ShortlistSizes = SIZES,
) -> torch.Tensor:
    """Tokens [n] int64 for logits [n, vocab] of rows [n], which will have these places [n].

    fields: of all rows, as views of their seats.
    """
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    figures = Figures.empty(logits, sizes)
    stops = (fields["stop_ids"], fields["min_total"])
    common = {"NUM_STOPS": MAX_STOP_IDS, "SEAT_WORDS": SEAT_WORDS, **pdl()}
    _survey[(num_rows, triton.cdiv(sizes.num_tiles(vocab), sizes.span))](
        logits, rows, places, fields["temperature"], *stops, figures.maxima, figures.sums,
        num_warps=8, **sizes.survey(vocab), **common,
    )  # fmt: skip
    drawn = (fields[name] for name in ("temperature", "top_p", "min_p", "top_k", "seed"))
    _pick[(num_rows,)](
        logits, rows, places, *drawn, *stops, figures.maxima, figures.sums, figures.near, figures.values, figures.ids,
        tokens, NO_SAMPLE=NO_SAMPLE, num_warps=sizes.num_warps, **sizes.search(vocab), **common,
    )  # fmt: skip
    return tokens
