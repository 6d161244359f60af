"""The kernels of experts, in Triton, for NVIDIA GPUs; they run under Triton's interpreter too.

A pair is a row and one of the experts that it chose. `route` ranks the router's logits and appends every pair to the
list of its expert. `grouped` multiplies the pairs of one list by their expert's weights, tile by tile: which tile a
program has it finds from the lengths of the lists, so the grid is fixed and the host knows no numbers. `combine` adds
up the pairs of a row, in the order of their ranks, whoever else is in the batch.

A shared expert is some experts more, behind the others, that every row has chosen: its parts. Of the router's logits
the one behind those of the experts is its gate's.

One row needs no lists: kernels/one_row_experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.launch import launch_dependents_and_wait


@triton.jit
def rank(logits, bias, E: tl.constexpr, BLOCK_E: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Experts of one row, their logits, and the place of each, 0 for the largest; equal ones in their order.

    The places are a permutation whatever the logits are: what is not a number comes last. So an expert that is found
    by its place always exists.
    """
    expert = tl.arange(0, BLOCK_E)
    there = expert < E
    logit = tl.load(logits + expert, mask=there, other=float("-inf"))
    if HAS_BIAS:
        logit += tl.load(bias + expert, mask=there, other=0.0).to(tl.float32)
    logit = tl.where(logit == logit, logit, float("-inf"))
    mine, other = logit[:, None], logit[None, :]
    is_before = (other > mine) | ((other == mine) & (expert[None, :] < expert[:, None]))
    return expert, logit, tl.sum(is_before.to(tl.int32), axis=1)


@triton.jit
def shares_of(logit, place, TOP: tl.constexpr, NORMALIZED: tl.constexpr):
    """The share of each expert: of the chosen ones NORMALIZED, else of all."""
    power = tl.exp(logit - tl.max(logit, axis=0))
    total = tl.sum(tl.where(place < TOP, power, 0.0), axis=0) if NORMALIZED else tl.sum(power, axis=0)
    return power / total


@triton.jit
def add_shared(
    expert, place, share, logits, E: tl.constexpr, TOP: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    """Experts, their places and shares, with the parts of the shared expert at the places behind the chosen ones.

    Which experts are chosen, the third result, is shown by their place no longer: those in between are not.
    """
    is_part = (expert >= E) & (expert < E + SHARED)
    is_chosen = is_part | (place < TOP)
    if SHARED > 0:
        place = tl.where(is_part, TOP + expert - E, place)
        share = tl.where(is_part, tl.sigmoid(tl.load(logits + E)), share)
    return place, share, is_chosen


@triton.jit(do_not_specialize=["num_rows", "num_squares"])
def route(
    logits, bias, counts, members, shares, squares, scales, num_rows, num_squares, eps,
    K: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, TOP: tl.constexpr, SHARED: tl.constexpr,
    LOGITS: tl.constexpr, NORMALIZED: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr,
    MAX_SQUARES: tl.constexpr, SQUARES_STRIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: its pairs to the lists, their shares, and with NORM the factor of the row's norm.

    logits [num_rows, LOGITS]; counts [E + SHARED], zero before; members [E + SHARED, num_rows]: pairs;
    shares [num_rows, TOP + SHARED].
    """
    launch_dependents_and_wait(PDL)
    row = tl.program_id(0)
    expert, logit, place = rank(logits + row * LOGITS, bias, E, BLOCK_E, HAS_BIAS)
    share = shares_of(logit, place, TOP, NORMALIZED)
    place, share, is_chosen = add_shared(expert, place, share, logits + row * LOGITS, E, TOP, SHARED)
    pair = row * (TOP + SHARED) + place
    tl.store(shares + pair, share, mask=is_chosen)
    position = tl.atomic_add(counts + expert, 1, mask=is_chosen, sem="relaxed")
    tl.store(members + expert.to(tl.int64) * num_rows + position, pair, mask=is_chosen)
    if NORM:
        index = tl.arange(0, MAX_SQUARES)
        sums = tl.load(squares + index * SQUARES_STRIDE + row, mask=index < num_squares, other=0.0)
        tl.store(scales + row, tl.rsqrt(tl.sum(sums, axis=0) / K + eps))


@triton.jit
def activate(gate, up, CLAMPED: tl.constexpr):
    if CLAMPED:  # that of GPT-OSS, as `models.linear.ClampedGated`
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        return gate / (1.0 + tl.exp(-1.702 * gate)) * up
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def tile_of(counts, tile, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile of pairs, E where there is no such tile, the first pair's place, and the list's length."""
    expert = tl.arange(0, BLOCK_E)
    count = tl.load(counts + expert, mask=expert < E, other=0)
    num_tiles = (count + BLOCK_M - 1) // BLOCK_M
    mine = tl.sum((tl.cumsum(num_tiles, axis=0) <= tile).to(tl.int32), axis=0)
    first = tile - tl.sum(tl.where(expert < mine, num_tiles, 0), axis=0)
    return mine, first * BLOCK_M, tl.sum(tl.where(expert == mine, count, 0), axis=0)


@triton.jit(do_not_specialize=["num_rows"])
def grouped(
    x, weight, bias, out, counts, members, factors, num_rows,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, TOP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr,
    NORM: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's pairs by one tile of columns.

    GATED: rows of x times gate and up (weight [E, 2 * N, K]), activated; with NORM, rows have their factors first.
    Otherwise pairs of x times weight [E, N, K], each times its share in `factors`.
    """
    tile = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # after the wait
    expert, first, count = tile_of(counts, tile, E, BLOCK_E, BLOCK_M)
    if expert < E:
        position = first + tl.arange(0, BLOCK_M)
        is_pair = position < count
        pair = tl.load(members + expert.to(tl.int64) * num_rows + position, mask=is_pair, other=0)
        row = pair // TOP if GATED else pair
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        is_column = column < N
        if NORM or not GATED:
            factor = tl.load(factors + row, mask=is_pair, other=0.0)[:, None]

        num_weights: tl.constexpr = 2 if GATED else 1
        x_at = x + row[:, None].to(tl.int64) * K + inner[None, :]
        weight_at = weight + (expert.to(tl.int64) * num_weights * N + column[:, None]) * K + inner[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        is_even: tl.constexpr = K % BLOCK_K == 0 and N % BLOCK_N == 0
        for start in range(0, K, BLOCK_K):
            is_inner = (start + inner < K)[None, :]
            is_weight = is_column[:, None] & is_inner
            a = tl.load(x_at + start, mask=is_pair[:, None] if is_even else is_pair[:, None] & is_inner, other=0.0)
            b = tl.load(weight_at + start, mask=None if is_even else is_weight, other=None if is_even else 0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
            if GATED:
                b = tl.load(
                    weight_at + N * K + start, mask=None if is_even else is_weight, other=None if is_even else 0.0
                )
                acc_up = tl.dot(a, tl.trans(b), acc_up, input_precision=PRECISION)
        if NORM:
            acc = acc * factor
            acc_up = acc_up * factor
        if HAS_BIAS:
            bias_at = bias + expert * num_weights * N + column
            acc += tl.load(bias_at, mask=is_column, other=0.0).to(tl.float32)[None, :]
            if GATED:
                acc_up += tl.load(bias_at + N, mask=is_column, other=0.0).to(tl.float32)[None, :]
        acc = activate(acc, acc_up, CLAMPED) if GATED else acc * factor
        at = out + pair[:, None].to(tl.int64) * N + column[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=is_pair[:, None] & is_column[None, :])


@triton.jit
def combine(
    parts, out, counts, squares,
    N: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, TOP: tl.constexpr, BLOCK_N: tl.constexpr,
    SQUARES: tl.constexpr, SQUARES_STRIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the pairs of a row to the stream, for one tile of columns, and leave sums of squares for the next norm.

    One program empties the lists for the next layer.
    """
    launch_dependents_and_wait(PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = column < N
    at = out + row * N + column
    total = tl.zeros([BLOCK_N], tl.float32)
    for place in tl.static_range(TOP):
        total += tl.load(parts + (row * TOP + place) * N + column, mask=mask, other=0.0).to(tl.float32)
    value = (tl.load(at, mask=mask, other=0.0).to(tl.float32) + total).to(out.dtype.element_ty)
    tl.store(at, value, mask=mask)
    if SQUARES:
        kept = value.to(tl.float32)
        tl.store(squares + tile * SQUARES_STRIDE + row, tl.sum(kept * kept, axis=0))
    if (row == 0) & (tile == 0):
        expert = tl.arange(0, BLOCK_E)
        tl.store(counts + expert, tl.zeros([BLOCK_E], tl.int32), mask=expert < E)
