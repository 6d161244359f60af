"""How products of few rows are tiled for a GPU, by their sizes. All rules come from measurements on an H200.

A rule says what was fastest in whole decode steps of an 8B and a 0.6B model, not one kernel at a time: the next kernel
begins with the shared memory, cores and bandwidth that a kernel leaves free. docs/LOG.md has the figures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Literal

MAX_ROWS = 256  # more are cuBLAS's
NARROW_ROWS = 32  # of weights of 8 bits: more are cuBLAS's, with rows of 8 bits too
NARROW_PROGRAMS = 192  # fewer, and the inner dimension is split
NUM_CORES = 132
SHARED_MEMORY_BYTES = 200_000  # that a program's stages may take there
HEAD_COLUMNS = 65536  # a product with more than this is a vocabulary's
LONG = 4096  # inner dimensions from here on are a large model's, which gains nothing by prefetches
SHORT_NUMBERS = 5 * 2**19  # a product of fewer weights does not trigger the next launch early
PREFETCH_BYTES = 16384
VECTOR_BYTES = 65536  # of weights that a program of the kernel for one row holds in registers, beside another one
ALONE_BYTES = 81920  # the same, of a program that has a core to itself
LEAST_INNER = 64  # of the inner dimension at a time
LEAST_PART = 128  # of the inner dimension, where it is split


# the launch of the next kernel: at once, when all weights are requested (in rings alone), or when they are read
Trigger = Literal["at once", "requested", "read"]


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut, and when its kernel triggers the launch of the next one."""

    block_m: int
    block_n: int
    block_k: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    row_stages: int = 0  # of a ring, for its rows: fewer than for its weights, or 0, as many
    prefetch_bytes: int = 0  # of its weights, that a program prefetches before it waits
    triggers: Trigger = "read"
    kernel: Literal["tiles", "vector", "ring"] = "tiles"
    cluster: bool = False  # of a ring: its parts are joined in shared memory (kernels/cluster)

    def stages_within(self, shared_bytes: int, *, gated: bool, number_bytes: int = 2) -> int:
        """As many stages as it wants and as fit: each has a tile of rows, and one or two of weights."""
        stage_bytes = self.block_k * (2 * self.block_m + number_bytes * self.block_n * (2 if gated else 1))
        return max(1, min(self.num_stages, shared_bytes // stage_bytes))

    def cuts(self, inner: int, splits: int) -> bool:
        """Whether the inner dimension has so many parts. Those of a ring are equal; others differ by a tile at most."""
        least = self.block_k if self.kernel == "tiles" else splits * self.block_k
        return inner % least == 0 and (splits == 1 or splits * max(self.block_k, LEAST_PART) <= inner)

    def divides(self, columns: int, inner: int) -> bool:
        return columns % self.block_n == 0 and self.cuts(inner, self.splits)


@lru_cache(maxsize=4096)  # a step without a graph asks for every product of every layer
def choose_tiling(
    num_rows: int,
    columns: int,
    inner: int,
    *,
    gated: bool = False,
    adds: bool = False,
    ring: bool = False,
    clusters: bool = False,
    narrow: bool = False,
) -> Tiling | None:
    """How to cut a product of rows with a weight [columns, inner] (gated: two of them); None: cuBLAS is to take it.

    adds: the result is added to a residual. ring: the kernel with a ring of weights can run.
    clusters: its programs can be joined in clusters. narrow: weights of 8 bits.
    """
    if narrow:
        return _narrow(num_rows, columns, inner, gated=gated, adds=adds, ring=ring)
    tiling = _one_row(columns, inner, gated=gated) if num_rows == 1 else None
    if tiling is None and ring and num_rows <= 32:
        tiling = _in_ring(num_rows, columns, inner, gated=gated, adds=adds)
        if tiling is not None and clusters and num_rows > 16 and tiling.splits > 1:
            tiling = _in_clusters(tiling, inner)
    if tiling is None:
        choose = _few_rows if num_rows <= 64 else _many_rows
        tiling = choose(num_rows, columns, inner, gated=gated, adds=adds)
    return tiling if tiling is not None and tiling.divides(columns, inner) else None


def _one_row(columns: int, inner: int, *, gated: bool) -> Tiling | None:
    """The largest tiles that leave at most four cores without one, else the smallest; all programs run at once."""
    num_weights = 2 if gated else 1
    for block_n in (32, 16, 8):
        block_k = _inner(inner, (1024 if block_n == 8 else 512) // num_weights)
        num_programs = columns // block_n
        most_bytes = VECTOR_BYTES if num_programs > NUM_CORES else ALONE_BYTES
        fits = num_programs <= 2 * NUM_CORES and 2 * num_weights * block_n * inner <= most_bytes
        divides = columns % block_n == 0 and inner % block_k == 0
        if fits and divides and (num_programs >= NUM_CORES - 4 or block_n == 8):
            return Tiling(1, block_n, block_k, num_warps=8, kernel="vector")
    return None


def _in_ring(num_rows: int, columns: int, inner: int, *, gated: bool, adds: bool) -> Tiling | None:
    """Where prefetched weights gain more than the ring's shared memory costs other kernels."""
    choose = _in_ring_large if inner >= LONG else _in_ring_small
    tiling = choose(16 if num_rows <= 16 else 32, columns, inner, gated=gated, adds=adds)
    return tiling if tiling is not None and tiling.divides(columns, inner) else None


def _in_clusters(tiling: Tiling, inner: int) -> Tiling:
    """Of a large model, in parts of half the inner dimension and narrow tiles: all programs run at once, two a core."""
    if inner >= LONG:
        tiling = replace(tiling, block_n=32, splits=2, num_stages=6)
    return replace(tiling, cluster=True)


def _in_ring_large(block_m: int, columns: int, inner: int, *, gated: bool, adds: bool) -> Tiling | None:
    """Of a large model: QKV, out, gate and up; its head and down have no gain by it."""
    few = block_m == 16
    if columns > HEAD_COLUMNS or inner > columns:
        return None
    if gated:
        return Tiling(block_m, 64, 256, num_stages=2, kernel="ring")
    if adds:
        tiling = Tiling(block_m, 64, 128, num_stages=6 if few else 4, kernel="ring")
        return _split(tiling, columns, inner, num_programs=128 if few else 256)
    block_k, num_stages = (128, 6) if few else (256, 3)
    return Tiling(block_m, 64, block_k, num_stages=num_stages, triggers="requested", kernel="ring")


def _in_ring_small(block_m: int, columns: int, inner: int, *, gated: bool, adds: bool) -> Tiling | None:
    """Of a small model, above 16 rows, where every program has a core to itself; of those that add, only short ones.

    QKV triggers at once, so that attention requests its first keys while the product before QKV still runs. So does
    out: gate and up, with fewer stages for rows, fit beside it, and begin wherever attention has ended.
    """
    if block_m == 16 and gated and inner < 2048 and columns >= 8192:
        return Tiling(block_m, 64, 128, num_stages=3, kernel="ring")
    if block_m == 16 or columns > 32 * NUM_CORES:
        return None
    if gated:
        return Tiling(block_m, 32, 256, row_stages=2, kernel="ring")
    if not adds:
        return Tiling(block_m, 32, 128, triggers="at once", kernel="ring")
    if columns * inner >= SHORT_NUMBERS:
        return None
    tiling = Tiling(block_m, 32, 256, num_stages=2, triggers="at once", kernel="ring")
    return _split(tiling, columns, inner, num_programs=128)


def _narrow(num_rows: int, columns: int, inner: int, *, gated: bool, adds: bool, ring: bool) -> Tiling | None:
    """Of weights of 8 bits. Triggers were chosen in a chain of products, at 1 and 32 rows; QKV as in whole steps."""
    if num_rows > NARROW_ROWS:
        return None
    block_m = max(8 if ring else 16, 1 << (num_rows - 1).bit_length())
    tiling = Tiling(block_m, 64, 256 if ring else 128, num_stages=3 if ring else 4, kernel="ring" if ring else "tiles")
    if ring and (block_m > 16 or (adds and inner <= columns)):
        tiling = replace(tiling, triggers="at once")
    if ring and not gated and not adds:
        tiling = replace(tiling, triggers="requested")
    if gated:
        tiling = replace(tiling, num_stages=3 if block_m == 8 else 2)
    else:
        tiling = _split(tiling, columns, inner, num_programs=NARROW_PROGRAMS)
    return tiling if tiling.divides(columns, inner) else None


def _few_rows(num_rows: int, columns: int, inner: int, *, gated: bool, adds: bool) -> Tiling:
    """One tile of rows, with as many stages as there is memory for."""
    block_m = max(16, 1 << (num_rows - 1).bit_length())  # what the matrix units take
    if columns > HEAD_COLUMNS:
        tiling = Tiling(
            block_m,
            128 if num_rows > 16 and columns % 128 == 0 else 64,
            _inner(inner, 128),
            num_stages=3,
            triggers="at once",
        )
    else:
        choose = _few_rows_large if inner >= LONG else _few_rows_small
        tiling = choose(block_m, columns, inner, gated=gated, adds=adds)
    num_stages = tiling.stages_within(SHARED_MEMORY_BYTES, gated=gated)
    return replace(tiling, num_stages=num_stages, prefetch_bytes=0 if inner >= LONG else PREFETCH_BYTES)


def _few_rows_large(block_m: int, columns: int, inner: int, *, gated: bool, adds: bool) -> Tiling:
    """Of a large model: wide ones with nothing fused into their end trigger early, QKV above all."""
    if gated:
        return Tiling(block_m, 64, _inner(inner, 128))
    if columns > 4096 and not adds:
        return Tiling(block_m, 64, _inner(inner, 256), triggers="at once")
    return _spread(Tiling(block_m, 64, _inner(inner, 128)), columns, inner)


def _few_rows_small(block_m: int, columns: int, inner: int, *, gated: bool, adds: bool) -> Tiling:
    """Of a small model: those that add do not trigger early above 32 rows, nor where they are short."""
    if gated:
        return _gate_small(block_m, columns, inner)
    block_n = 32 if columns <= 4096 else 64
    many = block_m == 64
    if many and not adds:
        return Tiling(block_m, block_n, 64, num_stages=6, triggers="at once")
    early = not many and columns * inner >= SHORT_NUMBERS
    tiling = Tiling(block_m, block_n, _inner(inner, 128), num_stages=5, triggers="at once" if early else "read")
    return _split(tiling, columns, inner, num_programs=128)


def _gate_small(block_m: int, columns: int, inner: int) -> Tiling:
    """Gate and up: with a core for each program they trigger early; otherwise two or more programs share a core."""
    block_n = 64 if 8192 <= columns <= 2 * 64 * NUM_CORES else 32
    tiling = Tiling(block_m, block_n, _inner(inner, 128))
    if columns <= block_n * NUM_CORES:
        return replace(tiling, num_stages=5, triggers="at once")
    return replace(tiling, num_stages=3 if block_n == 64 else 4)


def _many_rows(num_rows: int, columns: int, inner: int, *, gated: bool, adds: bool) -> Tiling | None:
    """Several tiles of rows, of small models alone, and where something is fused into the end."""
    if inner >= LONG or columns > 4096 or num_rows > MAX_ROWS:
        return None
    if gated:
        return Tiling(64, 64, 64) if num_rows > 128 else Tiling(128, 32, 64, num_stages=5)
    if not adds:
        return None
    return _split(Tiling(64, 64, _inner(inner, 128)), columns, inner, num_programs=128, row_tiles=-(-num_rows // 64))


def _inner(inner: int, most: int) -> int:
    """How much of the inner dimension a tile takes: the largest power of two that divides it."""
    return max(gcd(inner, most), LEAST_INNER)


def _spread(tiling: Tiling, columns: int, inner: int) -> Tiling:
    """The inner dimension cut into at least three parts, for one program a core if that gives as many, else two."""
    tiles = columns // tiling.block_n
    splits = NUM_CORES // tiles if 3 * tiles <= NUM_CORES else 2 * NUM_CORES // tiles
    fitting = [count for count in range(1, min(splits, 8) + 1) if tiling.cuts(inner, count)]
    return replace(tiling, splits=max(fitting, default=1))


def _split(tiling: Tiling, columns: int, inner: int, *, num_programs: int, row_tiles: int = 1) -> Tiling:
    """The inner dimension cut until there are enough programs: fewer leave cores idle."""
    splits = 1
    tiles = columns // tiling.block_n * row_tiles
    while splits < 8 and tiles * splits < num_programs and tiling.cuts(inner, 2 * splits):
        splits *= 2
    return replace(tiling, splits=splits)
