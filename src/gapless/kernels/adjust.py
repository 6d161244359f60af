"""Logits as a row's owner wants them, before any draw: masks, biases, penalties, then top-n-sigma and typical-p.

Two Triton kernels. The first makes a float32 copy of the logits of rows that need it, many programs a row. The second,
one program a row, puts tokens of the copy out of reach that top-n-sigma and typical-p do not keep. A row that needs
neither costs a look at its seat, and its copy is never read. `runner/processors.py` has the same in torch, the oracle.
Both can be captured in a graph and run under Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from gapless.core.params import MAX_STOP_IDS
from gapless.core.row_fields import SEAT_WORDS
from gapless.kernels.launch import launch_dependents_and_wait, pdl
from gapless.kernels.shortlist import float_of, key_of, look, num_forbidden, plain

UNALIGNED = ["rows", "places"]  # they may begin anywhere in a buffer, and no variant is compiled for it
BLOCK = 4096
BIASES = tl.constexpr(128)  # at a time


@triton.jit
def _penalize(x, count, repetition, presence, frequency):
    """A logit after penalties; count: as core/baggage has it."""
    generated = (count & 32767).to(tl.float32)
    factor = tl.where(count != 0, repetition, 1.0)
    x = tl.where(x > 0, x / factor, x * factor)
    return x - frequency * generated - tl.where(generated > 0, presence, 0.0)


@triton.jit
def _allow(x, mask, token, limit):
    """-inf for tokens whose bit is not set; those from `limit` on, and below 0, stay."""
    bits = tl.load(mask + token // 32, mask=(token >= 0) & (token < limit), other=-1)
    return tl.where((bits >> (token % 32)) & 1 == 1, x, -float("inf"))


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _adjust(
    logits, rows, is_adjusted, masked, repetitions, presences, frequencies, num_biases, masks, counts, biases, out,
    mask_stride, bias_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr, SEAT_WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some columns of one row. Biases come before penalties: their few tokens are computed once more."""
    launch_dependents_and_wait(PDL)
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    seat = row * SEAT_WORDS
    if tl.load(is_adjusted + seat) != 0:
        repetition = tl.load(repetitions + seat)
        presence = tl.load(presences + seat)
        frequency = tl.load(frequencies + seat)
        counted = tl.where((repetition != 1) | (presence != 0) | (frequency != 0), VOCAB, 0)  # tokens
        allowed = tl.where(tl.load(masked + seat) != 0, VOCAB, 0)  # tokens that have a bit
        first = tl.program_id(1) * BLOCK
        column = first + tl.arange(0, BLOCK)
        here = column < VOCAB
        counts += row * VOCAB
        masks += row * mask_stride
        logits += i * VOCAB
        out += i * VOCAB
        x = tl.load(logits + column, mask=here, other=-float("inf")).to(tl.float32)
        count = tl.load(counts + column, mask=column < counted, other=0).to(tl.int32)
        x = _penalize(x, count, repetition, presence, frequency)
        tl.store(out + column, _allow(x, masks, column, allowed), mask=here)
        total = tl.load(num_biases + seat)
        if total > 0:
            tl.debug_barrier()
            for start in range(0, total, BIASES):
                entry = start + tl.arange(0, BIASES)
                at = biases + row * bias_stride + 2 * entry
                token = tl.load(at, mask=entry < total, other=-1)
                mine = (token >= first) & (token < first + BLOCK) & (token < VOCAB)
                bias = tl.load(at + 1, mask=mine, other=0).to(tl.float32, bitcast=True)
                biased = tl.load(logits + token, mask=mine, other=0.0).to(tl.float32) + bias
                seen = tl.load(counts + token, mask=mine & (token < counted), other=0).to(tl.int32)
                biased = _penalize(biased, seen, repetition, presence, frequency)
                tl.store(out + token, _allow(biased, masks, token, allowed), mask=mine)


@triton.jit
def _floor_of_sigma(base, stops, num_stops, top_n, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit, and the one that lies so many standard deviations below it; -inf where top-n-sigma is off."""
    number = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    most = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, VOCAB, BLOCK):
        x = look(base, start + tl.arange(0, BLOCK), stops, num_stops, VOCAB)
        is_finite = x > -float("inf")
        number += is_finite.to(tl.float32)
        total += tl.where(is_finite, x, 0.0)
        most = tl.maximum(most, x)
    top = tl.max(most, axis=0)
    count = tl.maximum(tl.sum(number, axis=0), 1.0)
    mean = tl.sum(total, axis=0) / count
    squares = tl.zeros([BLOCK], tl.float32)
    if top_n > 0:
        for start in range(0, VOCAB, BLOCK):
            x = look(base, start + tl.arange(0, BLOCK), stops, num_stops, VOCAB)
            squares += tl.where(x > -float("inf"), (x - mean) * (x - mean), 0.0)
    sigma = tl.sqrt(tl.sum(squares, axis=0) / count)
    return top, tl.where(top_n > 0, top - top_n * sigma, -float("inf"))


@triton.jit
def _typical(base, stops, num_stops, top, floor, share, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The mean of logit - top by probability, and how far from it the logits may lie that together have `share`.

    A token's information lies as far from the entropy as its logit from that mean.
    """
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCAB, BLOCK):
        x = look(base, start + tl.arange(0, BLOCK), stops, num_stops, VOCAB)
        is_kept = (x >= floor) & (x > -float("inf"))
        below = tl.where(is_kept, x - top, 0.0)
        weight = tl.where(is_kept, tl.exp(below), 0.0)
        total += weight
        moment += weight * below
    mass = tl.sum(total.to(tl.float64), axis=0)
    mean = (tl.sum(moment.to(tl.float64), axis=0) / mass).to(tl.float32)
    wanted = tl.maximum((mass * share).to(tl.float32), 1e-30)  # one token at least
    low = key_of(mean * 0.0)  # distances of fewer than `low` are too little, those from `high` on are enough
    high = key_of(mean * 0.0 + 3.4028234663852886e38)
    while low < high:
        step = tl.maximum((high - low) // 4, 1)
        first = float_of(low + step - 1)
        second = float_of(tl.minimum(low + 2 * step - 1, high - 1))
        third = float_of(tl.minimum(low + 3 * step - 1, high - 1))
        sum_1 = tl.zeros([BLOCK], tl.float32)
        sum_2 = tl.zeros([BLOCK], tl.float32)
        sum_3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, VOCAB, BLOCK):
            x = look(base, start + tl.arange(0, BLOCK), stops, num_stops, VOCAB)
            is_kept = (x >= floor) & (x > -float("inf"))
            below = tl.where(is_kept, x - top, 0.0)
            weight = tl.where(is_kept, tl.exp(below), 0.0)
            distance = tl.abs(below - mean)
            sum_1 += tl.where(distance <= first, weight, 0.0)
            sum_2 += tl.where(distance <= second, weight, 0.0)
            sum_3 += tl.where(distance <= third, weight, 0.0)
        enough_1 = tl.sum(sum_1, axis=0) >= wanted
        enough_2 = tl.sum(sum_2, axis=0) >= wanted
        enough_3 = tl.sum(sum_3, axis=0) >= wanted
        at_1, at_2, at_3 = key_of(first), key_of(second), key_of(third)
        high = tl.where(enough_1, at_1, tl.where(enough_2, at_2, tl.where(enough_3, at_3, high)))
        past = tl.where(enough_2, at_1, tl.where(enough_3, at_2, at_3)) + 1
        low = tl.where(enough_1, low, past)
    return mean, float_of(high)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _narrow(
    out, rows, places, is_adjusted, top_n_sigmas, typical_ps, stop_ids, min_total,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, NUM_STOPS: tl.constexpr, SEAT_WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Put tokens of one row's copy out of reach, if the row narrows its choice so."""
    launch_dependents_and_wait(PDL)
    i = tl.program_id(0).to(tl.int64)
    seat = tl.load(rows + i) * SEAT_WORDS
    top_n = tl.load(top_n_sigmas + seat)
    share = tl.load(typical_ps + seat)
    if (tl.load(is_adjusted + seat) != 0) & ((top_n > 0) | (share < 1)):  # the seat of padding is all zeros
        out += i * VOCAB
        base = plain(out)
        stops = stop_ids + seat
        num_stops = num_forbidden(tl.load(places + i), min_total + seat, stops, NUM_STOPS)
        top, floor = _floor_of_sigma(base, stops, num_stops, top_n, VOCAB, BLOCK)
        if (top > -float("inf")) & (top < float("inf")):
            mean = top * 0.0
            farthest = mean + float("inf")
            if share < 1:
                mean, farthest = _typical(base, stops, num_stops, top, floor, share, VOCAB, BLOCK)
            for start in range(0, VOCAB, BLOCK):
                column = start + tl.arange(0, BLOCK)
                x = look(base, column, stops, num_stops, VOCAB)
                is_lost = (x < floor) | (tl.abs((x - top) - mean) > farthest)
                tl.store(out + column, tl.where(is_lost, -float("inf"), x), mask=column < VOCAB)


def adjust(
    logits: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    fields: Mapping[str, torch.Tensor],
    masks: torch.Tensor,
    counts: torch.Tensor,
    biases: torch.Tensor,
    block: int = BLOCK,
) -> torch.Tensor:
    """Logits [n, vocab] of rows [n] as float32, adjusted; of rows without a need for it, anything.

    fields: of all rows, as views of their seats. masks, counts, biases: of all rows (RowState).
    """
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, vocab, dtype=torch.float32, device=logits.device)
    asked = ("adjusted", "masked", "repetition_penalty", "presence_penalty", "frequency_penalty", "num_biases")
    common = {"VOCAB": vocab, "BLOCK": block, "SEAT_WORDS": SEAT_WORDS, **pdl()}
    _adjust[(num_rows, triton.cdiv(vocab, block))](
        logits, rows, *(fields[name] for name in asked), masks, counts, biases, out,
        masks.stride(0), biases.stride(0), num_warps=8, **common,
    )  # fmt: skip
    narrowing = [fields[name] for name in ("adjusted", "top_n_sigma", "typical_p", "stop_ids", "min_total")]
    _narrow[(num_rows,)](out, rows, places, *narrowing, NUM_STOPS=MAX_STOP_IDS, num_warps=16, **common)
    return out
