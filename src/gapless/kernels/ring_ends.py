"""What products of few rows in a ring of weights share, whatever their weights are: the ring's filling, and the end.

`ring` has weights of 16 bits and `narrow_ring` of 8. Layouts are the caller's.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from gapless.kernels import order_free

sync = getattr(gl, "barrier", None) or gl.thread_barrier
_copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

SUM_BITS, LEAST_EXPONENT = gl.constexpr(order_free.SUM_BITS.value), gl.constexpr(order_free.LEAST_EXPONENT.value)
STEP = gl.constexpr(64)  # of the inner dimension, that the matrix units take at a time


@gluon.jit
def fetch(
    weight, tiles, filled, stage, column, inner, wanted,
    N: gl.constexpr, GATED: gl.constexpr, STAGE_BYTES: gl.constexpr,
):  # fmt: skip
    """Request a stage of the ring: a tile of weights, or one of gate and one of up."""
    bar = filled.index(stage)
    mbarrier.expect(bar, STAGE_BYTES, pred=wanted)
    if GATED:
        _copy_tile(weight, [column, inner], bar, tiles.index(2 * stage), pred=wanted)
        _copy_tile(weight, [N + column, inner], bar, tiles.index(2 * stage + 1), pred=wanted)
    elif gl.num_ctas() > 1:
        _copy_tile(weight, [inner // STEP, column, 0], bar, tiles.index(stage), pred=wanted)
    else:
        _copy_tile(weight, [column, inner], bar, tiles.index(stage), pred=wanted)


@gluon.jit
def begin_ring(
    weight, tiles, filled, column, begin,
    N: gl.constexpr, BLOCK_K: gl.constexpr, NUM_CHUNKS: gl.constexpr, GATED: gl.constexpr, STAGE_BYTES: gl.constexpr,
):  # fmt: skip
    """Make the barriers, and request all stages, of as many chunks as there are."""
    num_stages: gl.constexpr = filled.shape[0]
    for i in gl.static_range(num_stages):
        mbarrier.init(filled.index(i), count=1)
    sync()
    for i in gl.static_range(num_stages):
        if i < NUM_CHUNKS:
            fetch(weight, tiles, filled, i, column, begin + i * BLOCK_K, True, N, GATED, STAGE_BYTES)


@gluon.jit
def load_sums(
    squares_in, num_squares,
    BLOCK_M: gl.constexpr, MAX_SQUARES: gl.constexpr, SQUARES_STRIDE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The sums of squares of the rows, one for each tile of the product that made them: [MAX_SQUARES, BLOCK_M]."""
    index = gl.arange(0, MAX_SQUARES, layout=gl.SliceLayout(1, LAYOUT))
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, LAYOUT))
    at = squares_in + (index * SQUARES_STRIDE)[:, None] + row[None, :]
    return gl.load(at, mask=(index < num_squares)[:, None], other=0.0)


@gluon.jit
def _any_sum(values, axis: gl.constexpr, ORDER_FREE: gl.constexpr):
    """The sum over an axis, as `order_free.any_sum`."""
    if not ORDER_FREE:
        return gl.sum(values, axis=axis)
    largest = gl.max(values, axis=axis).to(gl.int32, bitcast=True)
    exponent = gl.maximum(largest >> 23, LEAST_EXPONENT)
    inverse = ((-exponent + SUM_BITS + 254) << 23).to(gl.float32, bitcast=True)
    total = gl.sum((values * gl.expand_dims(inverse, axis) + 0.5).to(gl.int32), axis=axis)
    return total.to(gl.float32) * ((exponent - SUM_BITS) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def join(
    acc, parts, counters, tile, split,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SPLITS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Leave this part for the last one to finish. Whether that is this one, and if so the sum of all parts."""
    cells: gl.constexpr = BLOCK_M * BLOCK_N
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    cell = (row * BLOCK_N)[:, None] + column[None, :]
    part_at = parts + tile * cells + cell
    gl.store(part_at + split * gl.num_programs(0) * cells, acc)
    sync()  # every thread's part is written before the count says so
    is_last = gl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if is_last:
        gl.store(counters + tile, 0)  # ready for the next product
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=LAYOUT)
        for other in gl.static_range(SPLITS):
            acc += gl.load(part_at + other * gl.num_programs(0) * cells, cache_modifier=".cg")
    return is_last, acc


@gluon.jit
def finish(
    acc, acc_up, sums, residual, out, squares_out, row, column, at, mask, tile, eps, bias,
    K: gl.constexpr, NORM: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr, HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, SQUARES_STRIDE: gl.constexpr, ORDER_FREE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Norm, bias, gate or residual, then the result to `out`; with a residual, the sums of its squares too."""
    if NORM:
        total = gl.convert_layout(_any_sum(sums, 0, ORDER_FREE), gl.SliceLayout(1, LAYOUT))
        scale = gl.rsqrt(total / K + eps)[:, None]
        acc = acc * scale
        acc_up = acc_up * scale
    if HAS_BIAS:
        acc += gl.load(bias + column).to(gl.float32)[None, :]
    if GATED:
        logit = acc
        if ACTIVATION == "gelu_tanh":  # as `skinny`
            logit = 1.5957691216057308 * (acc + 0.044715 * acc * acc * acc)
        acc = acc / (1.0 + gl.exp(-logit)) * acc_up
    if ADD:
        acc += residual.to(gl.float32)
    value = acc.to(out.dtype.element_ty)
    gl.store(out + at, value, mask=mask)
    if ADD:
        kept = value.to(gl.float32)
        squares = _any_sum(gl.where(mask, kept * kept, 0.0), 1, ORDER_FREE)
        gl.store(squares_out + tile * SQUARES_STRIDE + row, squares)
