"""The products of experts whose weights are numbers of 4 bits (MXFP4), in Triton; they run under its interpreter too.

A weight is read as it lies in memory, and made whole a tile at a time, in registers: e2m1 numbers, of which 32 share a
power of two. Whole numbers have few bits, so nothing is rounded. How pairs are grouped `kernels/experts` says.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.experts import activate, tile_of

# Four e2m1 numbers, in the low or high halves of four bytes, as bfloat16, times their powers. Their bits are those of a
# bfloat16 that is 2^126 times too small (0x7e80). What is added to a product is -0, which changes nothing.
_UNPACK = """
{{
.reg .b32 a, b, factor, zero;
mov.b32 factor, 0x7e807e80;
mov.b32 zero, 0x80008000;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
and.b32 a, a, {mask};
and.b32 b, b, {mask};
mul.lo.u32 a, a, {shifts};
mul.lo.u32 b, b, {shifts};
and.b32 a, a, 0x81c081c0;
and.b32 b, b, 0x81c081c0;
fma.rn.bf16x2 a, a, factor, zero;
fma.rn.bf16x2 b, b, factor, zero;
fma.rn.bf16x2 $0, a, $3, zero;
fma.rn.bf16x2 $1, b, $4, zero;
}}
"""
UNPACK_LOW = tl.constexpr(_UNPACK.format(mask="0x000f000f", shifts="0x1040"))
UNPACK_HIGH = tl.constexpr(_UNPACK.format(mask="0x00f000f0", shifts="0x0104"))


@triton.jit
def _whole(byte, powers, HIGH: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr, IN_PAIRS: tl.constexpr):
    """One half of bytes [BLOCK_N, 64] times powers of two: every second byte of `powers` [BLOCK_N].

    Else than IN_PAIRS: the bits of a magnitude are those of a float16 that is 2^14 times too small.
    """
    bits = (powers[:, None] >> (8 * HIGH + 16 * tl.arange(0, 2))[None, :]) & 255
    if IN_PAIRS:
        power = (bits << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        power = tl.reshape(tl.broadcast_to(power[:, :, None], (BLOCK_N, 2, 32)), (BLOCK_N, 64))
        return tl.inline_asm_elementwise(
            UNPACK_HIGH if HIGH else UNPACK_LOW, "=r,=r,r,r,r", [byte, power], dtype=tl.bfloat16, is_pure=True, pack=4
        )  # fmt: skip
    code = byte.to(tl.int32) >> (4 * HIGH)
    half = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.uint16).to(tl.float16, bitcast=True)
    power = (bits << 23).to(tl.float32, bitcast=True) * 16384.0
    value = tl.reshape(half.to(tl.float32), (BLOCK_N, 2, 32)) * power[:, :, None]
    return tl.reshape(value, (BLOCK_N, 64)).to(DTYPE)


@triton.jit
def _add_product(
    acc, low, high, weight_at, powers_at, is_column,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """Add rows times a tile. low, high: columns of the rows that belong to the two halves of a byte."""
    byte = tl.load(weight_at, mask=is_column[:, None], other=0)
    powers = tl.load(powers_at, mask=is_column, other=0)
    some = _whole(byte, powers, 0, BLOCK_N, low.dtype, IN_PAIRS)
    acc = tl.dot(low, tl.trans(some), acc, input_precision=PRECISION)
    some = _whole(byte, powers, 1, BLOCK_N, low.dtype, IN_PAIRS)
    return tl.dot(high, tl.trans(some), acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_rows"])
def grouped_narrow(
    x, weight, powers, bias, out, counts, members, factors, num_rows,
    N: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, TOP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, IN_PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `experts.grouped`, of rows that are normalized already.

    weight [E, columns, PACKED / 2] bytes: of 64 numbers the first 32 are the low halves of 32 bytes.
    powers [E, columns, PACKED / 128] int32: a byte for every 32 numbers. PACKED: K, and zeros up to a multiple of 128.
    IN_PAIRS: rows are bfloat16, and the GPU multiplies two such numbers at a time.
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
            acc = _add_product(acc, low, high, at, power_at, is_column, BLOCK_N, PRECISION, IN_PAIRS)
            if GATED:
                at, power_at = at + N * (PACKED // 2), power_at + N * (PACKED // BLOCK_K)
                acc_up = _add_product(acc_up, low, high, at, power_at, is_column, BLOCK_N, PRECISION, IN_PAIRS)
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
