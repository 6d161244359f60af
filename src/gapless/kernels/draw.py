"""The sampler for NVIDIA GPUs: greedy, drawn, filtered, without a sort, in three Triton kernels.

The same meaning as `sampler.sample`, which is its oracle in tests. The first kernel surveys the logits
(kernels/shortlist.py), the second picks a token, one program a row. A filter keeps every token from some logit up, and
that logit is among the largest: the program compares each logit of the shortlist with each other one, which tells how
many are larger and how much they weigh. A row without filters needs no shortlist: the sums of its tiles say in which
tile the token is. The third kernel (kernels/row_passes.py) has nothing to do unless a filter keeps more tokens than a
shortlist has room for. All can be captured in a graph, and run under Triton's interpreter too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from gapless.core.params import MAX_STOP_IDS
from gapless.core.plan import NO_SAMPLE
from gapless.core.row_fields import SEAT_WORDS
from gapless.kernels.inverse import slot_at, uniform_of
from gapless.kernels.launch import launch_dependents_and_wait, pdl
from gapless.kernels.row_passes import UNALIGNED, UNSETTLED, pick_by_passes
from gapless.kernels.shortlist import (
    SIZES,
    Figures,
    ShortlistSizes,
    floor_of_min_p,
    limit_for,
    list_from,
    load_list,
    look,
    num_forbidden,
    sum_tiles,
    survey_columns,
    top_k_of,
    warmth_of,
)

SPARE = tl.constexpr(0.25)  # of the mass that top-p leaves out: a shortlist reads tiles of so much more than it needs

MAX_REGISTERS = 128  # a thread's; two programs fit on a multiprocessor then


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _survey(
    logits, adjusted, rows, places, is_adjusted, temperatures, top_ks, stop_ids, min_total, maxima, sums,
    VOCAB: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, NUM_TILES: tl.constexpr, NUM_STOPS: tl.constexpr,
    SEAT_WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The figures of some tiles of one row: sums only where a token is drawn without top-k, which needs none."""
    launch_dependents_and_wait(PDL)
    i = tl.program_id(0).to(tl.int64)
    seat = tl.load(rows + i) * SEAT_WORDS
    num_stops = num_forbidden(tl.load(places + i), min_total + seat, stop_ids + seat, NUM_STOPS)
    tile, column = survey_columns(TILE, SPAN)
    base = (logits + i * VOCAB, adjusted + i * VOCAB, tl.load(is_adjusted + seat))
    x = look(base, column, stop_ids + seat, num_stops, VOCAB)
    largest = tl.max(x, axis=1)
    tl.store(maxima + i * NUM_TILES + tile, largest, mask=tile < NUM_TILES)
    temperature = tl.load(temperatures + seat)
    if (temperature > 0) & (top_k_of(top_ks + seat, VOCAB) == 0):
        total = sum_tiles(x, largest, warmth_of(temperature))
        tl.store(sums + i * NUM_TILES + tile, total, mask=tile < NUM_TILES)


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
def _draw_listed(values, ids, count, top, warmth, top_k, total, top_p, floor, uniform, ROOM: tl.constexpr):
    """A token of the shortlist from what top-k, then top-p, then min-p (`floor`) leave standing, and the least of it.

    Without top-k, which is 0 then, top-p is a share of `total`, the mass of the whole row.
    """
    x, token = load_list(values, ids, count, ROOM)
    larger, above = _compare(values, x, count, top, warmth, ROOM)
    is_kept = (larger < tl.where(top_k > 0, top_k, ROOM)) & (x > -float("inf"))
    weight = tl.where(is_kept, tl.exp((x - top) * warmth), 0.0)
    share = tl.where(top_k > 0, tl.sum(weight, axis=0), total.to(tl.float32)) * top_p
    share = tl.where(top_p < 1, share, float("inf"))
    is_kept = is_kept & ((larger == 0) | ((above < share) & (x >= floor)))
    weight = tl.where(is_kept, weight, 0.0)
    slot, _ = slot_at(weight, uniform * tl.sum(weight.to(tl.float64), axis=0), ROOM)
    least = tl.min(tl.where(is_kept, x, top), axis=0)
    return tl.sum(tl.where(tl.arange(0, ROOM) == slot, token, 0), axis=0), least


@triton.jit
def _draw_filtered(
    base, stops, num_stops, largest, mass, near, values, ids, top, warmth, top_k, total, top_p, floor, uniform,
    VOCAB: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr,
    FIRST: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The token of a row with filters, and the least logit that they keep.

    UNSETTLED where the longest shortlist does not show all of those.
    """
    goal = tl.where((top_k > 0) | (top_p >= 1), 0.0, total * (top_p + (1 - top_p) * SPARE)).to(tl.float32)
    least = tl.maximum(top_k, FIRST)
    count = least * 0
    is_enough = least < 0
    while (least <= ROOM) & (is_enough == 0):
        limit = limit_for(largest, top, least, mass, goal)
        limit = tl.where(top_k > 0, limit, tl.where(top_p < 1, tl.maximum(limit, floor), floor))
        count = list_from(
            limit, base, largest, near, values, ids, stops, num_stops,
            VOCAB, TILE, NUM_TILES, TILES, CHUNK, ROOM,
        )  # fmt: skip
        x, _ = load_list(values, ids, count, ROOM)
        listed = tl.sum(tl.exp((x - top) * warmth), axis=0)
        shows_p = (floor >= limit) | ((top_p < 1) & (listed >= top_p * total))
        is_enough = tl.where(top_k > 0, count >= top_k, shows_p) | (limit == -float("inf"))
        is_enough = is_enough & (count <= ROOM)
        least = tl.where(count <= ROOM, 4 * least, ROOM + 1)
    token = tl.full([], UNSETTLED, tl.int32)
    kept = top
    if is_enough:
        if count <= ROOM // 4:  # most lists are short
            token, kept = _draw_listed(
                values, ids, count, top, warmth, top_k, total, top_p, floor, uniform, ROOM // 4
            )  # fmt: skip
        else:
            token, kept = _draw_listed(values, ids, count, top, warmth, top_k, total, top_p, floor, uniform, ROOM)
    return token, kept


@triton.jit
def _draw_unfiltered(
    base, stops, num_stops, mass, top, warmth, target,
    VOCAB: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The token of a row without filters: the tile in which the sum of weights passes `target`, and the token there."""
    tile, before = slot_at(mass, target, TILES)
    x = look(base, tile * TILE + tl.arange(0, TILE), stops, num_stops, VOCAB)
    slot, _ = slot_at(tl.exp((x - top) * warmth), target - before, TILE)
    return tile * TILE + slot


@triton.jit
def _first_of_largest(
    base, stops, num_stops, largest, top,
    VOCAB: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The first token that has the largest logit."""
    tile = tl.min(tl.where(largest == top, tl.arange(0, TILES), TILES), axis=0)
    column = tile * TILE + tl.arange(0, TILE)
    x = look(base, column, stops, num_stops, VOCAB)
    return tl.min(tl.where(x == top, column, VOCAB), axis=0)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _pick(
    logits, adjusted, rows, places, is_adjusted, temperatures, top_ps, min_ps, top_ks, seeds, stop_ids, min_total,
    maxima, sums, near, values, ids, tokens, bounds,
    VOCAB: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr,
    FIRST: tl.constexpr, ROOM: tl.constexpr, NUM_STOPS: tl.constexpr, NO_SAMPLE: tl.constexpr,
    SEAT_WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The next token of one row; NO_SAMPLE where its largest logit is not finite."""
    launch_dependents_and_wait(PDL)
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    seat = row * SEAT_WORDS
    base = (logits + i * VOCAB, adjusted + i * VOCAB, tl.load(is_adjusted + seat))
    stops = stop_ids + seat
    place = tl.load(places + i)
    num_stops = num_forbidden(place, min_total + seat, stops, NUM_STOPS)
    tile = i * NUM_TILES + tl.arange(0, TILES)
    here = tl.arange(0, TILES) < NUM_TILES
    largest = tl.load(maxima + tile, mask=here, other=-float("inf"))
    top = tl.max(largest, axis=0)
    temperature = tl.load(temperatures + seat)
    token = tl.full([], NO_SAMPLE, tl.int32)
    kept = tl.full([], -float("inf"), tl.float32)
    if (top > -float("inf")) & (top < float("inf")):
        if temperature > 0:
            warmth = warmth_of(temperature)
            top_k = top_k_of(top_ks + seat, VOCAB)
            top_p = tl.load(top_ps + seat)
            floor = floor_of_min_p(top, temperature, tl.load(min_ps + seat))
            uniform = uniform_of(tl.load(seeds + row * (SEAT_WORDS // 2)), place)
            mass = tl.zeros([TILES], tl.float32)
            if top_k == 0:
                mass = tl.load(sums + tile, mask=here, other=0.0) * tl.exp((largest - top) * warmth)
            total = tl.sum(mass.to(tl.float64), axis=0)
            if (top_k > 0) | (top_p < 1) | (floor > -float("inf")):
                token, kept = _draw_filtered(
                    base, stops, num_stops, largest, mass, near + i * NUM_TILES, values + i * ROOM, ids + i * ROOM,
                    top, warmth, top_k, total, top_p, floor, uniform,
                    VOCAB, TILE, NUM_TILES, TILES, CHUNK, FIRST, ROOM,
                )  # fmt: skip
            else:
                target = uniform * total
                token = _draw_unfiltered(base, stops, num_stops, mass, top, warmth, target, VOCAB, TILE, TILES)
        else:
            token = _first_of_largest(base, stops, num_stops, largest, top, VOCAB, TILE, TILES)
    tl.store(tokens + i, token.to(tl.int64))
    tl.store(bounds + 2 * i, top)
    tl.store(bounds + 2 * i + 1, kept)


def draw(
    logits: torch.Tensor,
    adjusted: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    fields: Mapping[str, torch.Tensor],
    sizes: ShortlistSizes = SIZES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [n] int64 for logits [n, vocab] of rows [n], which will have these places [n]; and bounds (Basis).

    adjusted [n, vocab] float32: read in place of the logits for rows whose field `adjusted` says so.
    fields: of all rows, as views of their seats.
    """
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    bounds = torch.empty(num_rows, 2, dtype=torch.float32, device=logits.device)
    figures = Figures.empty(logits, sizes)
    stops = (fields["stop_ids"], fields["min_total"])
    asked = [fields[name] for name in ("temperature", "top_p", "min_p", "top_k", "seed")]
    common = {"NUM_STOPS": MAX_STOP_IDS, "SEAT_WORDS": SEAT_WORDS, **pdl()}
    _survey[(num_rows, triton.cdiv(sizes.num_tiles(vocab), sizes.span))](
        logits, adjusted, rows, places, fields["adjusted"], fields["temperature"], fields["top_k"], *stops,
        figures.maxima, figures.sums,
        num_warps=8, **sizes.survey(vocab), **common,
    )  # fmt: skip
    _pick[(num_rows,)](
        logits, adjusted, rows, places, fields["adjusted"], *asked, *stops, *figures.all(), tokens, bounds,
        NO_SAMPLE=NO_SAMPLE, num_warps=8, maxnreg=MAX_REGISTERS, **sizes.search(vocab), **common,
    )  # fmt: skip
    pick_by_passes[(num_rows,)](
        logits, adjusted, rows, places, fields["adjusted"], *asked, *stops, figures.maxima, tokens, bounds,
        num_warps=16, **sizes.passes(vocab), **common,
    )  # fmt: skip
    return tokens, bounds
