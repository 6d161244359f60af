"""Log-probabilities for NVIDIA GPUs, in two Triton kernels that a graph can hold: survey, then one program a row.

The same meaning as `logprobs.score`, which is its oracle in tests. Of equal logits the lower token comes first, and a
NaN has no probability. Most rows need their shortlist alone (kernels/shortlist.py). A rank that lies below it takes
one more pass over the row, and likeliest tokens that tie with more than it has room for one pass each.
Of rows that want it, the survey makes the logits that the token was drawn from, in the copy that the draw leaves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.core.params import MAX_LOGPROBS, MAX_STOP_IDS
from gapless.core.row_fields import SEAT_WORDS
from gapless.kernels.basis import Basis
from gapless.kernels.launch import launch_dependents_and_wait, pdl
from gapless.kernels.shortlist import (
    SIZES,
    Figures,
    ShortlistSizes,
    fetch,
    limit_for,
    list_from,
    load_list,
    look,
    num_forbidden,
    plain,
    sum_tiles,
    survey_columns,
)

UNALIGNED = ["tokens", "places", "rows", "positions", "num_top", "out"]  # they may begin anywhere in a buffer
LOST = tl.constexpr(triton.next_power_of_2(MAX_LOGPROBS))  # tokens that are looked at for those of no probability


@triton.jit
def _drawn_from(
    i, logits, adjusted, column, seat, position, is_adjusted, temperatures, stop_ids, min_total, bounds,
    VOCAB: tl.constexpr, NUM_STOPS: tl.constexpr,
):  # fmt: skip
    """The logits of these columns that the token of row `i` was drawn from: 0 is the largest, -inf those left out."""
    base = (logits + i * VOCAB, adjusted + i * VOCAB, tl.load(is_adjusted + seat))
    stops = stop_ids + seat
    x = look(base, column, stops, num_forbidden(position, min_total + seat, stops, NUM_STOPS), VOCAB)
    temperature = tl.load(temperatures + seat)
    scaled = tl.div_rn(x - tl.load(bounds + 2 * i), tl.where(temperature > 0, temperature, 1.0))
    return tl.where(x >= tl.load(bounds + 2 * i + 1), scaled, -float("inf"))


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _survey(
    logits, places, maxima, sums, adjusted, rows, positions, is_processed, is_adjusted, temperatures, stop_ids,
    min_total, bounds,
    VOCAB: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, NUM_TILES: tl.constexpr, NUM_STOPS: tl.constexpr,
    SEAT_WORDS: tl.constexpr, PROCESSED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The figures of some tiles of one row, if it has a score."""
    launch_dependents_and_wait(PDL)
    i = tl.program_id(0).to(tl.int64)
    if tl.load(places + i) >= 0:
        tile, column = survey_columns(TILE, SPAN)
        is_drawn_from = tl.full([], 0, tl.int32)
        seat = tl.full([], 0, tl.int64)
        if PROCESSED:
            seat = tl.load(rows + i) * SEAT_WORDS
            is_drawn_from = tl.load(is_processed + seat)
        x = tl.full([SPAN, TILE], -float("inf"), tl.float32)
        if is_drawn_from == 0:
            x = look(plain(logits + i * VOCAB), column, places, 0, VOCAB)
        else:
            if PROCESSED:
                x = _drawn_from(
                    i, logits, adjusted, column, seat, tl.load(positions + i), is_adjusted, temperatures, stop_ids,
                    min_total, bounds, VOCAB, NUM_STOPS,
                )  # fmt: skip
                tl.store(adjusted + i * VOCAB + column, x, mask=column < VOCAB)
        largest = tl.max(x, axis=1)
        tl.store(maxima + i * NUM_TILES + tile, largest, mask=tile < NUM_TILES)
        tl.store(sums + i * NUM_TILES + tile, sum_tiles(x, largest, 1.0), mask=tile < NUM_TILES)


@triton.jit
def _num_larger(base, own, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits of a row are larger than one of them."""
    larger = tl.zeros([BLOCK], tl.int32)
    fetched = fetch(base, tl.arange(0, BLOCK), VOCAB)
    for start in range(0, VOCAB, BLOCK):
        following = fetch(base, start + BLOCK + tl.arange(0, BLOCK), VOCAB)
        larger += (fetched > own).to(tl.int32)  # which NaN is not
        fetched = following
    return tl.sum(larger, axis=0)


@triton.jit
def _next_best(base, above, after, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of a row behind the one that is `above` at the place `after`, and the first place it has."""
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    place = tl.full([BLOCK], VOCAB, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = look(base, column, base[0], 0, VOCAB)
        is_left = ((x < above) | ((x == above) & (column > after))) & (column < VOCAB)
        is_better = is_left & ((x > best) | (place == VOCAB))
        best = tl.where(is_better, x, best)
        place = tl.where(is_better, column, place)
    top = tl.max(best, axis=0)
    return top, tl.min(tl.where(best == top, place, VOCAB), axis=0)


@triton.jit
def _order(values, x, count, ROOM: tl.constexpr):
    """The place of each logit of the shortlist [ROOM] in descending order, equals by their place in the list."""
    slot = tl.arange(0, ROOM)
    order = tl.zeros([ROOM], tl.int32)
    for start in range(0, count, 8):
        for i in tl.static_range(8):
            other = tl.load(values + start + i, mask=start + i < count, other=-float("inf"))
            order += ((other > x) | ((other == x) & (start + i < slot))).to(tl.int32)
    return order


@triton.jit
def _tell_lost(base, out, count, wanted, VOCAB: tl.constexpr):
    """Behind `count` likeliest tokens, which are all that have a probability, the first of the others."""
    column = tl.arange(0, LOST)
    is_lost = (look(base, column, base[0], 0, VOCAB) == -float("inf")) & (column < VOCAB)
    order = count + tl.cumsum(is_lost.to(tl.int32), axis=0) - 1
    nothing = tl.full([LOST], -float("inf"), tl.float32)
    is_told = is_lost & (order < wanted)
    tl.store(out + order, column, mask=is_told)
    tl.store(out + wanted + order, nothing.to(tl.int32, bitcast=True), mask=is_told)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _score(
    logits, tokens, places, num_top, maxima, sums, near, values, ids, out, adjusted, rows, is_processed,
    VOCAB: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr,
    FIRST: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr, SEAT_WORDS: tl.constexpr, PROCESSED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The score of one row, if it has one."""
    launch_dependents_and_wait(PDL)
    i = tl.program_id(0).to(tl.int64)
    place = tl.load(places + i)
    if place >= 0:
        is_drawn_from = tl.full([], 0, tl.int32)
        if PROCESSED:
            is_drawn_from = tl.load(is_processed + tl.load(rows + i) * SEAT_WORDS)
        base = (logits + i * VOCAB, adjusted + i * VOCAB, is_drawn_from)
        wanted = tl.load(num_top)
        out += place.to(tl.int64) * (2 + 2 * wanted)
        tile = tl.arange(0, TILES)
        here = tile < NUM_TILES
        largest = tl.load(maxima + i * NUM_TILES + tile, mask=here, other=-float("inf"))
        total = tl.load(sums + i * NUM_TILES + tile, mask=here, other=0.0)
        top = tl.max(largest, axis=0)
        log_total = tl.log(tl.sum(total * tl.exp(largest - top), axis=0))
        values += i * ROOM
        ids += i * ROOM
        limit = limit_for(largest, top, tl.maximum(wanted, FIRST), total, 0.0)
        count = list_from(
            limit, base, largest, near + i * NUM_TILES, values, ids, logits, 0,
            VOCAB, TILE, NUM_TILES, TILES, CHUNK, ROOM,
        )  # fmt: skip
        x, token = load_list(values, ids, count, ROOM)
        own = look(base, tl.maximum(tl.load(tokens + i), 0), logits, 0, VOCAB)  # NO_SAMPLE has no logit
        larger = tl.sum((x > own).to(tl.int32), axis=0)
        if (own < limit) | (count > ROOM):
            larger = _num_larger(base, own, VOCAB, BLOCK)
        tl.store(out, ((own - top) - log_total).to(tl.int32, bitcast=True))
        tl.store(out + 1, larger + 1)
        if count <= ROOM:
            order = _order(values, x, count, ROOM)
            is_told = (order < wanted) & (tl.arange(0, ROOM) < count)
            tl.store(out + 2 + order, token, mask=is_told)
            tl.store(out + 2 + wanted + order, ((x - top) - log_total).to(tl.int32, bitcast=True), mask=is_told)
            if count < wanted:
                _tell_lost(base, out + 2, count, wanted, VOCAB)
        else:
            above = tl.full([], float("inf"), tl.float32)
            after = tl.full([], -1, tl.int32)
            for slot in range(wanted):
                above, after = _next_best(base, above, after, VOCAB, BLOCK)
                tl.store(out + 2 + slot, after)
                tl.store(out + 2 + wanted + slot, ((above - top) - log_total).to(tl.int32, bitcast=True))


def score_rows(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    places: torch.Tensor,
    num_top: torch.Tensor,
    out: torch.Tensor,
    basis: Basis | None = None,
    sizes: ShortlistSizes = SIZES,
) -> None:
    """Write the scores of tokens [n] int64 under logits [n, vocab] to `out` int32.

    places [n] int32: which score of `out` each row has, -1 for none. num_top [1] int32: likeliest tokens in each.
    basis: by which rows with the field `processed_scores` are scored. Its copy of their logits is written.
    """
    num_rows, vocab = logits.shape
    figures = Figures.empty(logits, sizes)
    common = {"SEAT_WORDS": SEAT_WORDS, "PROCESSED": basis is not None, **pdl()}
    asked = ("processed_scores", "adjusted", "temperature", "stop_ids", "min_total")
    adjusted, rows, *rest = (
        (logits, places, places, *[places] * len(asked), logits)  # not read
        if basis is None
        else (basis.adjusted, basis.rows, basis.places, *(basis.fields[name] for name in asked), basis.bounds)
    )
    _survey[(num_rows, triton.cdiv(sizes.num_tiles(vocab), sizes.span))](
        logits, places, figures.maxima, figures.sums, adjusted, rows, *rest,
        NUM_STOPS=MAX_STOP_IDS, num_warps=8, **sizes.survey(vocab), **common,
    )  # fmt: skip
    _score[(num_rows,)](
        logits, tokens, places, num_top, *figures.all(), out, adjusted, rows, rest[1],
        BLOCK=sizes.block, num_warps=8, **sizes.search(vocab), **common,
    )  # fmt: skip
