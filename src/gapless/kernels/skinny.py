"""The kernels of products of few rows, in Triton, for NVIDIA GPUs; they run under Triton's interpreter too.

`product` takes tiles of rows and columns through the matrix units; long inner dimensions are split, and the last part
to finish adds up all parts, in a fixed order. `vector_product` is for one row: each program holds all of its weights in
registers before the row is there. How they are cut, and what is fused in, is the caller's business.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.launch import launch_dependents_and_wait, prefetch
from gapless.kernels.order_free import any_sum

FUSED_ACTIVATIONS = ("silu", "gelu_tanh")  # of gates, within a product


@triton.jit
def _logit(gate, ACTIVATION: tl.constexpr):
    """Both activations are a gate times the sigmoid of something; GELU with tanh is, written otherwise."""
    if ACTIVATION == "gelu_tanh":
        gate = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate


@triton.jit
def _prefetch_weights(
    weight, tile, begin,
    K: tl.constexpr, PART: tl.constexpr, BLOCK_N: tl.constexpr, PREFETCH_BYTES: tl.constexpr, PREFETCHES: tl.constexpr,
):  # fmt: skip
    """Prefetch the beginnings of this program's rows of the weight, `PREFETCH_BYTES` in all. PART: no part is less."""
    prefetches_a_row: tl.constexpr = PREFETCHES // BLOCK_N
    number_bytes: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    size: tl.constexpr = min(PREFETCH_BYTES // PREFETCHES, PART * number_bytes // prefetches_a_row)
    piece = tl.arange(0, PREFETCHES)
    row = (tile * BLOCK_N + piece // prefetches_a_row).to(tl.int64)
    at = (row * K + begin) * number_bytes + (piece % prefetches_a_row) * size
    prefetch(weight.to(tl.int64) + at, tl.full([PREFETCHES], size, tl.int32))


@triton.jit
def _join(
    acc, parts, counters, tile, split, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Leave this part for the last one to finish. Whether that is this one, and if so the sum of all parts."""
    num_cells = tl.num_programs(0) * tl.num_programs(2)
    cell = tile * tl.num_programs(2) + tl.program_id(2)
    part_at = parts + tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(part_at + (split * num_cells + cell) * BLOCK_M * BLOCK_N, acc)
    tl.debug_barrier()  # every thread's part is written before the count says so
    is_last = tl.atomic_add(counters + cell, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if is_last:
        tl.store(counters + cell, 0)  # ready for the next product
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for other in tl.static_range(SPLITS):
            acc += tl.load(part_at + (other * num_cells + cell) * BLOCK_M * BLOCK_N, cache_modifier=".cg")
    return is_last, acc


@triton.jit(do_not_specialize_on_alignment=["num_rows"])  # else a rare number of rows is compiled in the middle of work
def product(
    x, weight, out, parts, counters, squares_in, squares_out, num_rows, num_squares, eps, bias, scales,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, MAX_SQUARES: tl.constexpr,
    SQUARES_STRIDE: tl.constexpr, PREFETCH_BYTES: tl.constexpr, PREFETCHES: tl.constexpr, TRIGGER: tl.constexpr,
    ORDER_FREE: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, SCALES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of columns and rows, over one part of the inner dimension. Parts differ by BLOCK_K at most.

    GATED: the weight has gate rows, then up rows. ACTIVATION: of the gate, one of FUSED_ACTIVATIONS.
    SCALES: "none", or for weights of 8 bits "columns": scales [N], or "blocks": scales [K / BLOCK_K, N]; gated 2 * N.
    ORDER_FREE: sums of squares do not depend on the tile (kernels/order_free).
    TRIGGER: when the next kernel may be launched, see `tilings.Trigger`.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    num_chunks: tl.constexpr = K // BLOCK_K
    part_chunks: tl.constexpr = num_chunks // SPLITS
    if num_chunks % SPLITS == 0:
        begin, part_size = split * (part_chunks * BLOCK_K), part_chunks * BLOCK_K
    else:
        begin = split * num_chunks // SPLITS * BLOCK_K
        part_size = (split + 1) * num_chunks // SPLITS * BLOCK_K - begin
    inner = begin + tl.arange(0, BLOCK_K)
    mask = (row < num_rows)[:, None]
    at = row[:, None].to(tl.int64) * N + column[None, :]
    if PDL:
        if PREFETCH_BYTES > 0:
            _prefetch_weights(weight, tile, begin, K, part_chunks * BLOCK_K, BLOCK_N, PREFETCH_BYTES, PREFETCHES)
            if GATED:
                _prefetch_weights(
                    weight + N * K, tile, begin, K, part_chunks * BLOCK_K, BLOCK_N, PREFETCH_BYTES, PREFETCHES
                )  # fmt: skip
        if TRIGGER == "at once":
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # all that came before is written from here on
    if NORM:  # the end needs them: loaded before the loop
        index = tl.arange(0, MAX_SQUARES)[:, None]
        sums = tl.load(squares_in + index * SQUARES_STRIDE + row[None, :], mask=index < num_squares, other=0.0)
    if ADD:
        residual = tl.load(out + at, mask=mask, other=0.0)

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    x_at = x + row[:, None] * K + inner[None, :]
    weight_at = weight + column[:, None].to(tl.int64) * K + inner[None, :]
    for start in range(0, part_size, BLOCK_K):
        a = tl.load(x_at + start, mask=mask, other=0.0)
        if SCALES == "blocks":
            scales_at = scales + (begin + start) // BLOCK_K * (N * (2 if GATED else 1)) + column
            part = tl.dot(a, tl.trans(tl.load(weight_at + start)).to(a.dtype))
            acc += part * tl.load(scales_at)[None, :]
            if GATED:
                part = tl.dot(a, tl.trans(tl.load(weight_at + N * K + start)).to(a.dtype))
                acc_up += part * tl.load(scales_at + N)[None, :]
        else:
            acc = tl.dot(a, tl.trans(tl.load(weight_at + start)).to(a.dtype), acc)
            if GATED:
                acc_up = tl.dot(a, tl.trans(tl.load(weight_at + N * K + start)).to(a.dtype), acc_up)
    if PDL and TRIGGER == "read":
        tl.extra.cuda.gdc_launch_dependents()  # the next kernel may be launched, and waits

    is_last = True
    if SPLITS > 1:
        is_last, acc = _join(acc, parts, counters, tile, split, BLOCK_M, BLOCK_N, SPLITS)
    if is_last:
        if SCALES == "columns":
            acc = acc * tl.load(scales + column)[None, :]
            if GATED:
                acc_up = acc_up * tl.load(scales + N + column)[None, :]
        if NORM:
            scale = tl.rsqrt(any_sum(sums, 0, ORDER_FREE) / K + eps)[:, None]
            acc = acc * scale
            if GATED:
                acc_up = acc_up * scale
        if HAS_BIAS:
            acc += tl.load(bias + column).to(tl.float32)[None, :]
        if GATED:
            acc = acc / (1.0 + tl.exp(-_logit(acc, ACTIVATION))) * acc_up
        if ADD:
            acc += residual.to(tl.float32)
        value = acc.to(out.dtype.element_ty)
        tl.store(out + at, value, mask=mask)
        if ADD:
            kept = value.to(tl.float32)
            squares = any_sum(tl.where(mask, kept * kept, 0.0), 1, ORDER_FREE)
            tl.store(squares_out + tile * SQUARES_STRIDE + row, squares)


@triton.jit
def vector_product(
    x, weight, out, squares_in, squares_out, num_squares, eps, bias, scales,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, MAX_SQUARES: tl.constexpr,
    SQUARES_STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, SCALES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One tile of columns for one row; the tile's weights are loaded before the row is waited for.

    SCALES: as of `product`, without blocks.
    """
    tile = tl.program_id(0)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    weight_at = weight + column[:, None].to(tl.int64) * K + inner[None, :]
    tiles = ()
    up_tiles = ()
    for start in tl.static_range(0, K, BLOCK_K):
        tiles += (tl.load(weight_at + start),)
        if GATED:
            up_tiles += (tl.load(weight_at + N * K + start),)
    launch_dependents_and_wait(PDL)
    pieces = ()
    for start in tl.static_range(0, K, BLOCK_K):
        pieces += (tl.load(x + start + inner),)
    if NORM:
        index = tl.arange(0, MAX_SQUARES)
        sums = tl.load(squares_in + index * SQUARES_STRIDE, mask=index < num_squares, other=0.0)
    if ADD:
        residual = tl.load(out + column)

    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i in tl.static_range(K // BLOCK_K):
        piece = pieces[i].to(tl.float32)[None, :]
        acc += tiles[i].to(tl.float32) * piece
        if GATED:
            acc_up += up_tiles[i].to(tl.float32) * piece
    value = tl.sum(acc, axis=1)
    up = tl.sum(acc_up, axis=1)
    if SCALES == "columns":
        value = value * tl.load(scales + column)
        if GATED:
            up = up * tl.load(scales + N + column)
    if NORM:
        scale = tl.rsqrt(tl.sum(sums, axis=0) / K + eps)
        value = value * scale
        up = up * scale
    if HAS_BIAS:
        value += tl.load(bias + column).to(tl.float32)
    if GATED:
        value = value * tl.sigmoid(_logit(value, ACTIVATION)) * up
    if ADD:
        value += residual.to(tl.float32)
    kept = value.to(out.dtype.element_ty)
    tl.store(out + column, kept)
    if ADD:
        tl.store(squares_out + tile * SQUARES_STRIDE, tl.sum(kept.to(tl.float32) * kept.to(tl.float32), axis=0))


@triton.jit
def embedding(ids, table, out, squares, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One token's embedding, and its sum of squares."""
    launch_dependents_and_wait(PDL)
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    value = tl.load(table + tl.load(ids + token).to(tl.int64) * SIZE + column, mask=mask, other=0.0)
    tl.store(out + token.to(tl.int64) * SIZE + column, value, mask=mask)
    kept = value.to(tl.float32)
    tl.store(squares + token, tl.sum(kept * kept, axis=0))
