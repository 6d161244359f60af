"""The experts of a single row, in three kernels, each a stream of weights; they run under Triton's interpreter too.

Programs hold a tile of weights in registers, and request it as early as they can: the router's before its row is there,
those of `down` as soon as the experts are known, while gate and up are still read. Each kernel triggers the next one
after its own wait, so the next one may read, before it waits itself, all that came before this one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.experts import activate, add_shared, rank, shares_of


@triton.jit
def _wait_and_trigger(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _norm_factor(
    squares, num_squares, eps, K: tl.constexpr, MAX_SQUARES: tl.constexpr, SQUARES_STRIDE: tl.constexpr
):  # fmt: skip
    index = tl.arange(0, MAX_SQUARES)
    sums = tl.load(squares + index * SQUARES_STRIDE, mask=index < num_squares, other=0.0)
    return tl.rsqrt(tl.sum(sums, axis=0) / K + eps)


@triton.jit(do_not_specialize=["num_squares"])
def choose_of_one(
    x, weight, bias, logits, chosen, shares, counter, squares, num_squares, eps,
    K: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, TOP: tl.constexpr, SHARED: tl.constexpr,
    LOGITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NORMALIZED: tl.constexpr,
    HAS_BIAS: tl.constexpr, MAX_SQUARES: tl.constexpr, SQUARES_STRIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The logits of some experts. The last program to finish ranks all, and leaves the chosen ones and their shares."""
    tile = tl.program_id(0)
    mine = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    tiles = ()
    for start in tl.static_range(0, K, BLOCK_K):
        at = weight + mine[:, None] * K + start + inner[None, :]
        tiles += (tl.load(at, mask=(mine < LOGITS)[:, None], other=0.0),)
    _wait_and_trigger(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i in tl.static_range(K // BLOCK_K):
        acc += tiles[i].to(tl.float32) * tl.load(x + i * BLOCK_K + inner).to(tl.float32)[None, :]
    factor = _norm_factor(squares, num_squares, eps, K, MAX_SQUARES, SQUARES_STRIDE)
    tl.store(logits + mine, tl.sum(acc, axis=1) * factor, mask=mine < LOGITS)
    tl.debug_barrier()  # every thread's logits are written before the count says so
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(counter, 0)  # ready for the next layer
        expert, logit, place = rank(logits, bias, E, BLOCK_E, HAS_BIAS)
        share = shares_of(logit, place, TOP, NORMALIZED)
        place, share, is_chosen = add_shared(expert, place, share, logits, E, TOP, SHARED)
        tl.store(chosen + place, expert, mask=is_chosen)
        tl.store(shares + place, share, mask=is_chosen)


@triton.jit(do_not_specialize=["num_squares"])
def gate_of_one(
    x, weight, out, chosen, shares, squares, num_squares, eps,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CLAMPED: tl.constexpr,
    MAX_SQUARES: tl.constexpr, SQUARES_STRIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gate and up of one chosen expert, activated, times its share, for a tile of columns."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.program_id(1)
    inner = tl.arange(0, BLOCK_K)
    pieces = ()
    for start in tl.static_range(0, K, BLOCK_K):
        pieces += (tl.load(x + start + inner),)
    factor = _norm_factor(squares, num_squares, eps, K, MAX_SQUARES, SQUARES_STRIDE)
    _wait_and_trigger(PDL)
    expert = tl.load(chosen + place).to(tl.int64)
    share = tl.load(shares + place)
    at = weight + (expert * 2 * N + column[:, None]) * K + inner[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    tiles = ()
    up_tiles = ()
    for start in tl.static_range(0, K, BLOCK_K):
        tiles += (tl.load(at + start),)
        up_tiles += (tl.load(at + N * K + start),)
    for i in tl.static_range(K // BLOCK_K):
        piece = pieces[i].to(tl.float32)[None, :]
        acc += tiles[i].to(tl.float32) * piece
        acc_up += up_tiles[i].to(tl.float32) * piece
    gate, up = tl.sum(acc, axis=1) * factor, tl.sum(acc_up, axis=1) * factor
    tl.store(out + place * N + column, (activate(gate, up, CLAMPED) * share).to(out.dtype.element_ty))


@triton.jit
def down_of_one(
    x, weight, out, chosen, squares,
    N: tl.constexpr, K: tl.constexpr, TOP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr, SQUARES_STRIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The TOP choices of the row, x [TOP, K], by a tile of columns of their experts, added to the stream.

    EARLY tiles of weights are requested before the wait for x, and as many are on their way from then on.
    """
    tile = tl.program_id(0)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    at = weight + column[:, None] * K + inner[None, :]
    num_pieces: tl.constexpr = K // BLOCK_K
    tiles = ()
    for i in tl.static_range(EARLY):
        expert = tl.load(chosen + i // num_pieces).to(tl.int64)
        tiles += (tl.load(at + expert * N * K + i % num_pieces * BLOCK_K),)
    _wait_and_trigger(PDL)
    residual = tl.load(out + column)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i in tl.static_range(TOP * num_pieces):
        if i + EARLY < TOP * num_pieces:
            expert = tl.load(chosen + (i + EARLY) // num_pieces).to(tl.int64)
            tiles += (tl.load(at + expert * N * K + (i + EARLY) % num_pieces * BLOCK_K),)
        acc += tiles[i].to(tl.float32) * tl.load(x + i * BLOCK_K + inner).to(tl.float32)[None, :]
    value = (tl.sum(acc, axis=1) + residual.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + column, value)
    kept = value.to(tl.float32)
    tl.store(squares + tile * SQUARES_STRIDE, tl.sum(kept * kept, axis=0))
