"""A product of few rows with FP8 weights in Gluon, for Hopper, as `ring.ring_product` is for weights of 16 bits.

Weights stream into the ring as they are, and become bfloat16 in registers. There they are the tall side of the matrix
units' products, so rows are read from shared memory by the units themselves, and no thread reads a row twice.
A thread finds four neighbouring weights in one register, but is to hold pairs eight places apart: rows are put into
shared memory in the order that makes up for it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gapless.kernels.ring_ends import STEP, begin_ring, fetch, finish, join, load_sums, sync

# Four FP8 numbers (e4m3) to bfloat16: exponent and fraction are moved up by four places, the sign by eight. Exponents
# keep their bias, so the numbers are too small by a power of two, by which the result is multiplied.
WIDEN = gl.constexpr("""{
    .reg .b32 a, b, s, t;
    prmt.b32 a, $2, 0, 0x4140;
    prmt.b32 b, $2, 0, 0x4342;
    and.b32 s, a, 0x00800080;
    and.b32 t, b, 0x00800080;
    mul.lo.u32 a, a, 16;
    mul.lo.u32 b, b, 16;
    mad.lo.u32 $0, s, 240, a;
    mad.lo.u32 $1, t, 240, b;
}""")
WIDENED = gl.constexpr(2.0**120)
SCALE_BLOCK = gl.constexpr(128)  # inner places that share a scale, where scales are not those of whole columns


@gluon.jit
def _weights(tile, LAYOUT: gl.constexpr):
    """Weights [columns, inner] from shared memory, as the matrix units take them, in the order of `_load_rows`."""
    narrow = tile.load(gl.DotOperandLayout(0, LAYOUT, 4))
    wide = gl.inline_asm_elementwise(WIDEN.value, "=r,=r,r", [narrow], dtype=gl.bfloat16, is_pure=True, pack=4)
    parts = wide.reshape([tile.shape[0], tile.shape[1] // 16, 4, 2, 2]).permute([0, 1, 3, 2, 4])
    return gl.convert_layout(parts.reshape([tile.shape[0], tile.shape[1]]), gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def _put_rows(rows, value):
    """Rows to shared memory, of every 16 numbers the pairs 0, 2, 4, 6, then 1, 3, 5, 7."""
    parts = value.reshape([value.shape[0], value.shape[1] // 16, 4, 2, 2]).permute([0, 1, 3, 2, 4])
    rows.store(parts.reshape([value.shape[0], value.shape[1]]))


@gluon.jit
def _multiply(
    acc, acc_up, rows, tiles, stage, BEGIN: gl.constexpr, END: gl.constexpr, GATED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add a stage's weights times its rows, from one of its inner places to another.

    Weights are widened while the matrix units take in those before them.
    """
    num_tiles: gl.constexpr = 2 if GATED else 1
    gate, up = tiles.index(num_tiles * stage), tiles.index(num_tiles * stage + num_tiles - 1)
    a = _weights(gate.slice(BEGIN, STEP, dim=1), LAYOUT)
    b = a
    acc = warpgroup_mma(a, rows.slice(BEGIN, STEP, dim=1).permute([1, 0]), acc, is_async=True)
    if GATED:
        b = _weights(up.slice(BEGIN, STEP, dim=1), LAYOUT)
        acc_up = warpgroup_mma(b, rows.slice(BEGIN, STEP, dim=1).permute([1, 0]), acc_up, is_async=True)
        acc, a = warpgroup_mma_wait(1, deps=[acc, a])
    for start in gl.static_range(BEGIN + STEP, END, STEP):
        some = rows.slice(start, STEP, dim=1).permute([1, 0])
        a = _weights(gate.slice(start, STEP, dim=1), LAYOUT)
        acc = warpgroup_mma(a, some, acc, is_async=True)
        if GATED:
            acc_up, b = warpgroup_mma_wait(1, deps=[acc_up, b])
            b = _weights(up.slice(start, STEP, dim=1), LAYOUT)
            acc_up = warpgroup_mma(b, some, acc_up, is_async=True)
            acc, a = warpgroup_mma_wait(1, deps=[acc, a])
        else:
            acc, b = warpgroup_mma_wait(1, deps=[acc, b])
            b = a
    if GATED:
        acc_up, b = warpgroup_mma_wait(0, deps=[acc_up, b])
    else:
        acc, b = warpgroup_mma_wait(0, deps=[acc, b])
    return acc, acc_up


@gluon.jit(do_not_specialize_on_alignment=["num_rows"])  # as `product`
def narrow_product(
    x, weight, out, parts, counters, squares_in, squares_out, num_rows, num_squares, eps, bias, scales,
    N: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    NUM_STAGES: gl.constexpr, SPLITS: gl.constexpr, NORM: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
    MAX_SQUARES: gl.constexpr, SQUARES_STRIDE: gl.constexpr, TRIGGER: gl.constexpr, HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """One tile of columns and all rows, over one part of the inner dimension.

    weight: a descriptor of [N, K] in tiles [BLOCK_N, BLOCK_K]. TRIGGER: see `tilings.Trigger`.
    SCALES: "columns": scales [N], or "blocks": scales [K / 128, N]; gated 2 * N.
    """
    num_warps: gl.constexpr = gl.num_warps()
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    rows_shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    out_layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [num_warps, 1], [1, 0])
    sums_layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [num_warps, 1], [1, 0])
    part_size: gl.constexpr = K // SPLITS
    num_chunks: gl.constexpr = part_size // BLOCK_K
    num_tiles: gl.constexpr = 2 if GATED else 1  # a stage
    stage_bytes: gl.constexpr = num_tiles * BLOCK_N * BLOCK_K
    tile = gl.program_id(0)
    split = gl.program_id(1)
    first_column = tile * BLOCK_N
    begin = split * part_size

    tiles = gl.allocate_shared_memory(weight.dtype, [NUM_STAGES * num_tiles, BLOCK_N, BLOCK_K], weight.layout)
    rows = gl.allocate_shared_memory(x.dtype.element_ty, [2, BLOCK_M, BLOCK_K], rows_shared)
    filled = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    begin_ring(weight, tiles, filled, first_column, begin, N, BLOCK_K, num_chunks, GATED, stage_bytes)
    if TRIGGER == "at once":
        gdc_launch_dependents()
    gdc_wait()  # all that came before is written from here on

    x_row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, load_layout))
    x_inner = begin + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, load_layout))
    x_mask = (x_row < num_rows)[:, None]
    x_at = x + (x_row * K)[:, None] + x_inner[None, :]
    _put_rows(rows.index(0), gl.load(x_at, mask=x_mask, other=0.0))
    fence_async_shared()
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, out_layout))
    column = first_column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, out_layout))
    mask = (row < num_rows)[:, None]
    at = (row * N)[:, None] + column[None, :]
    sums = 0.0
    residual = 0.0
    if NORM:  # the end needs them: loaded before the loop
        sums = load_sums(squares_in, num_squares, BLOCK_M, MAX_SQUARES, SQUARES_STRIDE, sums_layout)
    if ADD:
        residual = gl.load(out + at, mask=mask, other=0.0)
    sync()

    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=mma)
    acc_up = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=mma)
    for chunk in range(num_chunks):
        stage = chunk % NUM_STAGES
        following = gl.load(x_at + (chunk + 1) * BLOCK_K, mask=x_mask & (chunk + 1 < num_chunks), other=0.0)
        mbarrier.wait(filled.index(stage), (chunk // NUM_STAGES) & 1)
        here = rows.index(chunk % 2)
        if SCALES == "blocks":
            scaled_column = first_column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, mma))
            scales_at = scales + (begin + chunk * BLOCK_K) // SCALE_BLOCK * (N * num_tiles) + scaled_column
            zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=mma)
            for block in gl.static_range(BLOCK_K // SCALE_BLOCK):
                part, part_up = _multiply(
                    zeros, zeros, here, tiles, stage, block * SCALE_BLOCK, (block + 1) * SCALE_BLOCK, GATED, mma
                )  # fmt: skip
                acc += part * gl.load(scales_at + block * (N * num_tiles))[:, None]
                if GATED:
                    acc_up += part_up * gl.load(scales_at + block * (N * num_tiles) + N)[:, None]
        else:
            acc, acc_up = _multiply(acc, acc_up, here, tiles, stage, 0, BLOCK_K, GATED, mma)
        if TRIGGER == "requested":  # noqa: SIM102 (decided when compiled)
            if chunk == max(num_chunks - NUM_STAGES, 0):
                gdc_launch_dependents()
        _put_rows(rows.index((chunk + 1) % 2), following)
        fence_async_shared()
        sync()  # all threads have read the stage, and all rows are there
        ahead = chunk + NUM_STAGES
        wanted = ahead < num_chunks
        fetch(weight, tiles, filled, stage, first_column, begin + ahead * BLOCK_K, wanted, N, GATED, stage_bytes)
    if TRIGGER == "read":
        gdc_launch_dependents()

    acc = gl.convert_layout(acc.permute([1, 0]), out_layout) * WIDENED
    acc_up = gl.convert_layout(acc_up.permute([1, 0]), out_layout) * WIDENED
    is_last = True
    if SPLITS > 1:
        is_last, acc = join(acc, parts, counters, tile, split, BLOCK_M, BLOCK_N, SPLITS, out_layout)
    if is_last:
        if SCALES == "columns":
            acc = acc * gl.load(scales + column)[None, :]
            if GATED:
                acc_up = acc_up * gl.load(scales + N + column)[None, :]
        finish(
            acc, acc_up, sums, residual, out, squares_out, row, column, at, mask, tile, eps, bias,
            K, NORM, GATED, ADD, HAS_BIAS, ACTIVATION, SQUARES_STRIDE, False, out_layout,
        )  # fmt: skip
