"""The products of experts whose weights are numbers of 4 bits (MXFP4), in Triton; they run under its interpreter too.

A weight is read as it lies in memory, and made whole a tile at a time, in registers: e2m1 numbers, of which 32 share a
power of two. Whole numbers have few bits, so nothing is rounded. How pairs are grouped `kernels/experts` says.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.experts import activate, tile_of


@triton.jit
def _whole(code, powers, first: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr):
    """Codes [BLOCK_N, 64] times powers of two, every second byte of `powers` [BLOCK_N] from the first.

    The bits of a magnitude are those of a float16 that is 2^14 times too small, of which the smallest is subnormal.
    """
    half = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.uint16).to(tl.float16, bitcast=True)
    bits = (powers[:, None] >> (8 * first + 16 * tl.arange(0, 2))[None, :]) & 255
    power = (bits << 23).to(tl.float32, bitcast=True) * 16384.0
    value = tl.reshape(half.to(tl.float32), (BLOCK_N, 2, 32)) * power[:, :, None]
    return tl.reshape(value, (BLOCK_N, 64)).to(DTYPE)


@triton.jit
def _add_product(
    acc, low, high, weight_at, powers_at, is_column, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Add rows times a tile. low, high: columns of the rows that belong to the two halves of a byte."""
    code = tl.load(weight_at, mask=is_column[:, None], other=0).to(tl.int32)
    powers = tl.load(powers_at, mask=is_column, other=0)
    some = _whole(code & 15, powers, 0, BLOCK_N, low.dtype)
    acc = tl.dot(low, tl.trans(some), acc, input_precision=PRECISION)
    some = _whole(code >> 4, powers, 1, BLOCK_N, low.dtype)
    return tl.dot(high, tl.trans(some), acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_rows"])
def grouped_narrow(
    x, weight, powers, bias, out, counts, members, factors, num_rows,
    N: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, TOP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `experts.grouped`, of rows that are normalized already.

    weight [E, columns, PACKED / 2] bytes: of 64 numbers the first 32 are the low halves of 32 bytes.
    powers [E, columns, PACKED / 128] int32: a byte for every 32 numbers. PACKED: K, and zeros up to a multiple of 128.
    """
    tl.static_assert(BLOCK_K == 128)
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
        is_column = column < N
        byte = tl.arange(0, BLOCK_K // 2)
        inner = byte // 32 * 64 + byte % 32
        num_weights: tl.constexpr = 2 if GATED else 1
        weight_row = expert.to(tl.int64) * num_weights * N + column
        x_at = x + row[:, None].to(tl.int64) * K + inner[None, :]
        weight_at = weight + weight_row[:, None] * (PACKED // 2) + byte[None, :]
        powers_at = powers + weight_row * (PACKED // BLOCK_K)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            low = tl.load(x_at + start, mask=is_pair[:, None] & (start + inner < K)[None, :], other=0.0)
            high = tl.load(x_at + start + 32, mask=is_pair[:, None] & (start + 32 + inner < K)[None, :], other=0.0)
            at, power_at = weight_at + start // 2, powers_at + start // BLOCK_K
            acc = _add_product(acc, low, high, at, power_at, is_column, BLOCK_N, PRECISION)
            if GATED:
                at, power_at = at + N * (PACKED // 2), power_at + N * (PACKED // BLOCK_K)
                acc_up = _add_product(acc_up, low, high, at, power_at, is_column, BLOCK_N, PRECISION)
        if HAS_BIAS:
            bias_at = bias + expert * num_weights * N + column
            acc += tl.load(bias_at, mask=is_column, other=0.0).to(tl.float32)[None, :]
            if GATED:
                acc_up += tl.load(bias_at + N, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc = activate(acc, acc_up, CLAMPED)
        else:
            acc = acc * tl.load(factors + row, mask=is_pair, other=0.0)[:, None]
        at = out + pair[:, None].to(tl.int64) * N + column[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=is_pair[:, None] & is_column[None, :])
