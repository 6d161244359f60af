"""Batch-invariant products: the sums of a row are the same, in the same order, for any number of rows.

The inner dimension of a weight is cut into parts in one way that depends on the weight alone. Each part is added up
from zero, from its beginning to its end, and parts are added from the first to the last. The rest is free: tiles, warps
and stages change no bit, and neither does the instruction of the matrix units (measured on Hopper). So few rows go
through the fused kernels of `products`, one program a part, and many rows through `_wide_product`, where a program
takes all parts in turn. Weights that neither can tile have `plain_product`. All run under Triton's interpreter too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gapless.kernels.launch import launch_dependents_and_wait, pdl, shared_memory_bytes
from gapless.kernels.products import SPARE_BYTES, has_clusters, has_ring
from gapless.kernels.tilings import LONG, NUM_CORES, Tiling, choose_tiling

BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 64  # of the plain product
FEW_ROWS = 64  # that the fused kernels take
PART = 256  # parts are multiples of it, and tiles divide it
MAX_PARTS = 4
WIDE_K, WIDE_STAGES = 64, 4
WIDE_TILES = ((128, 256, 1.0), (128, 128, 0.85), (64, 128, 0.7), (64, 64, 0.5), (64, 32, 0.3))  # and relative speeds
GROUPED = 8  # tiles of rows that take the same weights one after the other


def sum_width(size: int) -> int:
    """Columns of a stream of this size whose squares are added up together."""
    return 64 if size >= LONG else 32


@lru_cache(maxsize=512)
def num_parts(columns: int, inner: int, *, adds: bool) -> int:
    """Parts of the inner dimension: several where columns alone would leave cores idle."""
    tiles, parts = columns // sum_width(columns), 1
    most = 256 if inner >= LONG else 128
    while adds and parts < MAX_PARTS and tiles * parts < most and inner % (2 * parts * PART) == 0:
        parts *= 2
    return parts


@lru_cache(maxsize=4096)
def tiling_of_few(num_rows: int, columns: int, inner: int, *, gated: bool = False, adds: bool = False) -> Tiling | None:
    """How a fused kernel takes these few rows; None: it cannot, for any number of rows."""
    parts = num_parts(columns, inner, adds=adds)
    clusters = has_clusters() and inner < LONG  # of large models the cut that suits them is a different one
    found = choose_tiling(max(num_rows, 2), columns, inner, gated=gated, adds=adds, ring=has_ring(), clusters=clusters)
    block_m = max(16, 1 << (num_rows - 1).bit_length())
    for tiling in (found, Tiling(block_m, 32, 64, num_stages=5)):
        if tiling is not None:
            cut = replace(tiling, splits=parts, block_n=sum_width(columns) if adds else tiling.block_n)
            if cut.divides(columns, inner):
                return cut
    return None


@lru_cache(maxsize=4096)
def tile_of_many(num_rows: int, columns: int, *, num_sums: int) -> tuple[int, int]:
    """Rows and columns of a tile, by the time that all waves of tiles take. num_sums: of each cell, held at once."""

    def time(tile: tuple[int, int, float]) -> float:
        block_m, block_n, speed = tile
        num_tiles = -(-num_rows // block_m) * -(-columns // block_n)
        return -(-num_tiles // NUM_CORES) * block_m * block_n / speed

    block_m, block_n, _ = min((tile for tile in WIDE_TILES if tile[1] * num_sums <= 256), key=time)
    return block_m, block_n


@triton.jit(do_not_specialize=["num_rows"])
def _wide_product(
    x, weight, out, scales, num_rows,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, GROUPED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One tile of the result. x, weight: descriptors of tiles, which read zeros beyond the edges."""
    launch_dependents_and_wait(PDL)
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    first = tl.program_id(0) // (GROUPED * columns) * GROUPED
    place = tl.program_id(0) % (GROUPED * columns)
    size = tl.minimum(tl.cdiv(num_rows, BLOCK_M) - first, GROUPED)
    first_row = (first + place % size) * BLOCK_M
    first_column = place // size * BLOCK_N
    part_size: tl.constexpr = K // PARTS

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for part in range(PARTS):
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        sums_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for inner in range(part * part_size, (part + 1) * part_size, BLOCK_K):
            rows = x.load([first_row, inner])
            sums = tl.dot(rows, tl.trans(weight.load([first_column, inner])), sums)
            if GATED:
                sums_up = tl.dot(rows, tl.trans(weight.load([N + first_column, inner])), sums_up)
        acc += sums
        acc_up += sums_up

    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    mask = (row < num_rows)[:, None] & (column < N)[None, :]
    at = row[:, None].to(tl.int64) * N + column[None, :]
    if NORM:
        scale = tl.load(scales + row, mask=row < num_rows, other=0.0)[:, None]
        acc = acc * scale
        acc_up = acc_up * scale
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    if ADD:
        acc += tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


def stages_of(stage_bytes: int) -> int:
    """As many stages as are of use, and as fit into shared memory."""
    limit = shared_memory_bytes()
    return WIDE_STAGES if limit is None else max(1, min(WIDE_STAGES, (limit - SPARE_BYTES) // stage_bytes))


class WideProduct:
    """Products of many rows with one weight [N, K] (gated: [2 * N, K]), whose descriptors are made once."""

    def __init__(self, weight: torch.Tensor, *, gated: bool = False, adds: bool = False) -> None:
        self._columns, self._inner = len(weight) // 2 if gated else len(weight), weight.shape[1]
        self._weight, self._gated, self._adds = weight, gated, adds
        self._parts = num_parts(self._columns, self._inner, adds=adds)
        self._tiles: dict[int, TensorDescriptor] = {}  # by their columns

    def __call__(self, x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
        """x times the weight, its rows times the scales where there are some, into `out` or added to it."""
        num_rows = len(x)
        num_sums = 2 if self._gated or self._parts > 1 else 1
        block_m, block_n = tile_of_many(num_rows, self._columns, num_sums=num_sums)
        if block_n not in self._tiles:
            self._tiles[block_n] = TensorDescriptor.from_tensor(self._weight, [block_n, WIDE_K])
        stage_bytes = x.element_size() * WIDE_K * (block_m + block_n * (2 if self._gated else 1))
        _wide_product[(triton.cdiv(num_rows, block_m) * triton.cdiv(self._columns, block_n),)](
            TensorDescriptor.from_tensor(x, [block_m, WIDE_K]), self._tiles[block_n], out,
            x if scales is None else scales, num_rows,
            N=self._columns, K=self._inner, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=WIDE_K, PARTS=self._parts,
            NORM=scales is not None, GATED=self._gated, ADD=self._adds, GROUPED=GROUPED,
            num_warps=8 if block_m == 128 else 4, num_stages=stages_of(stage_bytes), **pdl(),
        )  # fmt: skip
        return out


@triton.jit(do_not_specialize=["num_rows"])
def _plain_product(
    x, weight, bias, out, num_rows,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the result. Columns vary fastest, so that programs side by side share their rows of x."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + inner
        a = tl.load(x + row[:, None] * K + at[None, :], mask=(row < num_rows)[:, None] & (at < K)[None, :], other=0.0)
        b_at = weight + column[:, None].to(tl.int64) * K + at[None, :]
        b = tl.load(b_at, mask=(column < N)[:, None] & (at < K)[None, :], other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    mask = (row < num_rows)[:, None] & (column < N)[None, :]
    tl.store(out + row[:, None] * N + column[None, :], acc.to(out.dtype.element_ty), mask=mask)


def plain_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [m, K] times weight [N, K], plus bias [N], in x's dtype unless a different one is given: for any size."""
    num_rows, inner = x.shape
    columns = len(weight)
    out = torch.empty(num_rows, columns, dtype=dtype or x.dtype, device=x.device)
    _plain_product[(triton.cdiv(columns, BLOCK_N), triton.cdiv(num_rows, BLOCK_M))](
        x.contiguous(), weight, weight if bias is None else bias, out, num_rows,
        N=columns, K=inner, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, num_stages=4,
    )  # fmt: skip
    return out
