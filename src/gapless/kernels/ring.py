"""A product of few rows in Gluon, for GPUs with a copy engine for tiles (Hopper).

The copy engine prefetches tiles of weights into a ring in shared memory while the kernel before still computes the
rows (kernels/launch). Triton's own pipelines begin after the wait.
Gluon is Triton's language for layouts and copies by hand; it has no interpreter, and some names changed since 3.6.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gapless.kernels.cluster import copies, enter_cluster, join_in_cluster
from gapless.kernels.ring_ends import STEP, begin_ring, fetch, finish, join, load_sums, sync

_copy_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_view = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}
SWIZZLE_BYTES = 128  # a row of a step: with less, the copy engine would cut it, and lay the pieces out otherwise


def in_tiles(weight: torch.Tensor, block_n: int, block_k: int, num_ctas: int = 1) -> TensorDescriptor:
    """A weight [columns, inner] as the copy engine takes it, for programs in clusters of `num_ctas`.

    Gluon cuts no shared memory into slices in clusters, so there a stage is [step, column, STEP].
    """
    if num_ctas == 1:
        layout = gl.NVMMASharedLayout.get_default_for([block_n, block_k], DTYPES[weight.dtype])
        return TensorDescriptor.from_tensor(weight, [block_n, block_k], layout)
    columns, inner = weight.shape
    by_step = weight.view(columns, inner // STEP.value, STEP.value).transpose(0, 1)
    layout = gl.NVMMASharedLayout(SWIZZLE_BYTES, 16, rank=3, cga_layout=copies(3, num_ctas))
    return TensorDescriptor.from_tensor(by_step, [block_k // STEP.value, block_n, STEP.value], layout)


@gluon.constexpr_function
def _blocked(per_thread, threads, warps, num_ctas):
    return gl.BlockedLayout(per_thread, threads, warps, [1, 0], cga_layout=copies(2, num_ctas))


@gluon.constexpr_function
def _in_mma(row_warps, column_warps, num_ctas):
    cga = copies(2, num_ctas)
    return gl.NVMMADistributedLayout([2, 0], [row_warps, column_warps], [16, 8], cga_layout=cga)


@gluon.constexpr_function
def _swizzled(num_ctas):
    return gl.SwizzledSharedLayout(8, 1, 8, [1, 0], cga_layout=copies(2, num_ctas))


@gluon.constexpr_function
def _of_step(layout, num_ctas):
    """The layout of a step's weights, of that of a stage's."""
    sizes = layout.swizzle_byte_width, layout.element_bitwidth
    return gl.NVMMASharedLayout(*sizes, rank=2, cga_layout=copies(2, num_ctas))


@gluon.jit
def _fetch_rows(rows, stage, at, mask, STEPS: gl.constexpr):
    """Request a stage of rows; in a cluster, a step of the inner dimension after the other."""
    if gl.num_ctas() > 1:
        for step in gl.static_range(STEPS):
            _copy_rows(rows.index(stage * STEPS + step), at + step * STEP, mask=mask)
    else:
        _copy_rows(rows.index(stage), at, mask=mask)


@gluon.jit
def _step(stages, stage, step: gl.constexpr, STEPS: gl.constexpr):
    """A step of a stage of rows or of weights."""
    if gl.num_ctas() > 1:
        return stages.index(stage * STEPS + step)
    else:
        return stages.index(stage).slice(step * STEP, STEP, dim=1)


@gluon.jit
def _multiply(
    acc, acc_up, rows, tiles, row_stage, stage,
    BLOCK_K: gl.constexpr, GATED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add a stage's rows times its weights."""
    num_tiles: gl.constexpr = 2 if GATED else 1
    steps: gl.constexpr = BLOCK_K // STEP
    for step in gl.static_range(steps):
        a = _step(rows, row_stage, step, steps).load(gl.DotOperandLayout(0, LAYOUT, 2))
        some = _step(tiles, num_tiles * stage, step, steps).permute([1, 0])
        acc = mma_v2(a, some.load(gl.DotOperandLayout(1, LAYOUT, 2)), acc)
        if GATED:
            some = _step(tiles, num_tiles * stage + 1, step, steps).permute([1, 0])
            acc_up = mma_v2(a, some.load(gl.DotOperandLayout(1, LAYOUT, 2)), acc_up)
    return acc, acc_up


@gluon.jit(do_not_specialize_on_alignment=["num_rows"])  # as `product`
def ring_product(
    x, weight, out, parts, counters, squares_in, squares_out, num_rows, num_squares, eps, bias,
    N: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    NUM_STAGES: gl.constexpr, ROW_STAGES: gl.constexpr, SPLITS: gl.constexpr,
    NORM: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
    MAX_SQUARES: gl.constexpr, SQUARES_STRIDE: gl.constexpr, TRIGGER: gl.constexpr, ORDER_FREE: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """One tile of columns and all rows, over one part of the inner dimension, as `skinny.product`.

    weight: a descriptor of [N, K] in tiles [BLOCK_N, BLOCK_K]. ROW_STAGES: at most NUM_STAGES.
    TRIGGER: when the next kernel may be launched, see `tilings.Trigger`.
    """
    num_warps: gl.constexpr = gl.num_warps()
    num_ctas: gl.constexpr = gl.num_ctas()
    row_warps: gl.constexpr = 1 if BLOCK_M == 16 else 2
    mma: gl.constexpr = _in_mma(row_warps, num_warps // row_warps, num_ctas)
    rows_layout: gl.constexpr = _blocked([1, 8], [4, 8], [num_warps, 1], num_ctas)
    rows_shared: gl.constexpr = _swizzled(num_ctas)
    sums_layout: gl.constexpr = _blocked([1, 1], [1, 32], [num_warps, 1], num_ctas)
    part_size: gl.constexpr = K // SPLITS
    num_chunks: gl.constexpr = part_size // BLOCK_K
    num_tiles: gl.constexpr = 2 if GATED else 1  # a stage
    stage_bytes: gl.constexpr = num_tiles * BLOCK_N * BLOCK_K * (weight.dtype.primitive_bitwidth // 8)
    tile = gl.program_id(0)
    split = gl.program_id(1)
    if num_ctas > 1:
        split = enter_cluster()
    first_column = tile * BLOCK_N
    begin = split * part_size

    steps: gl.constexpr = BLOCK_K // STEP
    if num_ctas > 1:
        gl.static_assert(not GATED)
        tiles = gl.allocate_shared_memory(weight.dtype, [NUM_STAGES, steps, BLOCK_N, STEP], weight.layout)
        weights = _view(tiles, weight.dtype, [NUM_STAGES * steps, BLOCK_N, STEP], _of_step(weight.layout, num_ctas))
        rows = gl.allocate_shared_memory(x.dtype.element_ty, [ROW_STAGES * steps, BLOCK_M, STEP], rows_shared)
    else:
        tiles = gl.allocate_shared_memory(weight.dtype, [NUM_STAGES * num_tiles, BLOCK_N, BLOCK_K], weight.layout)
        weights = tiles
        rows = gl.allocate_shared_memory(x.dtype.element_ty, [ROW_STAGES, BLOCK_M, BLOCK_K], rows_shared)
    filled = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    begin_ring(weight, tiles, filled, first_column, begin, N, BLOCK_K, num_chunks, GATED, stage_bytes)
    if TRIGGER == "at once":
        gdc_launch_dependents()
    gdc_wait()  # all that came before is written from here on

    x_row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, rows_layout))
    x_inner = begin + gl.arange(0, STEP if num_ctas > 1 else BLOCK_K, layout=gl.SliceLayout(0, rows_layout))
    x_mask = (x_row < num_rows)[:, None]
    x_at = x + (x_row * K)[:, None] + x_inner[None, :]
    for i in gl.static_range(ROW_STAGES):
        if i < num_chunks:
            _fetch_rows(rows, i, x_at + i * BLOCK_K, x_mask, steps)
        async_copy.commit_group()
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, mma))
    column = first_column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, mma))
    mask = (row < num_rows)[:, None]
    at = (row * N)[:, None] + column[None, :]
    sums = 0.0
    residual = 0.0
    if NORM:  # the end needs them: loaded before the loop
        sums = load_sums(squares_in, num_squares, BLOCK_M, MAX_SQUARES, SQUARES_STRIDE, sums_layout)
    if ADD:
        residual = gl.load(out + at, mask=mask, other=0.0)

    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=mma)
    acc_up = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=mma)
    for chunk in range(num_chunks):
        stage = chunk % NUM_STAGES
        row_stage = chunk % ROW_STAGES
        async_copy.wait_group(ROW_STAGES - 1)
        mbarrier.wait(filled.index(stage), (chunk // NUM_STAGES) & 1)
        sync()  # rows that other threads copied are there as well
        acc, acc_up = _multiply(acc, acc_up, rows, weights, row_stage, stage, BLOCK_K, GATED, mma)
        if TRIGGER == "requested":  # noqa: SIM102 (decided when compiled)
            if chunk == max(num_chunks - NUM_STAGES, 0):
                gdc_launch_dependents()
        if num_chunks > ROW_STAGES:
            sync()  # all threads have read the stages
        if num_chunks > NUM_STAGES:
            ahead = chunk + NUM_STAGES
            wanted = ahead < num_chunks
            fetch(weight, tiles, filled, stage, first_column, begin + ahead * BLOCK_K, wanted, N, GATED, stage_bytes)
        if num_chunks > ROW_STAGES:
            ahead = chunk + ROW_STAGES
            _fetch_rows(rows, row_stage, x_at + ahead * BLOCK_K, x_mask & (ahead < num_chunks), steps)
        async_copy.commit_group()
    if TRIGGER == "read":
        gdc_launch_dependents()

    is_last = True
    if num_ctas > 1:
        is_last, acc = join_in_cluster(acc, split, BLOCK_M, BLOCK_N, SPLITS, mma)
    elif SPLITS > 1:
        is_last, acc = join(acc, parts, counters, tile, split, BLOCK_M, BLOCK_N, SPLITS, mma)
    if is_last:
        finish(
            acc, acc_up, sums, residual, out, squares_out, row, column, at, mask, tile, eps, bias,
            K, NORM, GATED, ADD, HAS_BIAS, ACTIVATION, SQUARES_STRIDE, ORDER_FREE, mma,
        )  # fmt: skip
