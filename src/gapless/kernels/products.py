"""Matrix products of few rows with everything around them fused in, each as one kernel, for NVIDIA GPUs.

A decode step is bound by the bytes of its weights and by the number of its kernels. So a product includes the norm
before it (a factor for each row, from sums of squares that the kernel before left behind), or SiLU and the gate after
it, or the residual that it is added to.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton

from gapless.kernels import skinny
from gapless.kernels.launch import HOPPER, generation, gluon_kernels, pdl, shared_memory_bytes
from gapless.kernels.tilings import MAX_ROWS, Tiling, choose_tiling

SQUARES_TILES = 512  # column tiles of a residual at most
PARTS = 2**21  # numbers that the parts of a split product have at most
COUNTERS = 512  # tiles of a split product at most
SPARE_BYTES = 8192  # of shared memory, for what is not a stage
PREFETCHES = 128  # pieces of its weights that a program prefetches


class Workspace:
    """Scratch memory of all products of one device; the compute stream alone touches it."""

    def __init__(self, device: torch.device) -> None:
        self.parts = torch.empty(PARTS, dtype=torch.float32, device=device)
        self.counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        self.squares = torch.zeros(SQUARES_TILES * MAX_ROWS, dtype=torch.float32, device=device)


def embed(ids: torch.Tensor, table: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """Rows of the table [vocab, size], and in the workspace one sum of squares for each."""
    size = table.shape[1]
    out = torch.empty(len(ids), size, dtype=table.dtype, device=table.device)
    block = triton.next_power_of_2(size)
    skinny.embedding[(len(ids),)](ids, table, out, workspace.squares, SIZE=size, BLOCK=block, num_warps=4, **pdl())
    return out


@cache
def has_ring() -> bool:
    """Whether the kernel in Gluon runs here: on Hopper, with a Triton whose Gluon it knows."""
    return generation() == HOPPER and all(gluon_kernels(name) is not None for name in ("ring", "narrow_ring"))


@cache
def has_clusters() -> bool:
    """Whether programs of the ring may be joined in clusters: where Gluon's clusters are those of Triton 3.6."""
    return has_ring() and bool(gluon_kernels("cluster").is_known())


def tiling_for(
    num_rows: int, columns: int, inner: int, *, gated: bool = False, adds: bool = False, narrow: bool = False
) -> Tiling | None:
    """How this GPU is to take a product, narrow: with weights of 8 bits; None: cuBLAS is to take it."""
    return choose_tiling(
        num_rows, columns, inner, gated=gated, adds=adds, ring=has_ring(), clusters=has_clusters(), narrow=narrow
    )


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    workspace: Workspace,
    tiling: Tiling,
    *,
    num_squares: int = 0,
    eps: float = 0.0,
    gated: bool = False,
    activation: str = "silu",
    add_to: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    order_free: bool = False,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [m, K] times weight [N, K] (gated: [2 * N, K]), in x's dtype unless a different one is given, plus bias [N].

    activation: of the gate, one of FUSED_ACTIVATIONS.

    With `scales` [1, len(weight)], or [K / 128, len(weight)], the weight is of 8 bits, and these are its columns'.

    With `num_squares`, rows of x are first normalized by the sums of squares in the workspace; with `add_to`, the
    result is added to it in place, and its sums of squares are left in the workspace, one for each tile of columns.
    Not both: sums would be written over while others still read them. `order_free`: of squares, see kernels/order_free.
    """
    assert num_squares == 0 or add_to is None
    assert bias is None or not gated  # gate and up would have two
    num_rows, inner = x.shape
    columns = len(weight) // 2 if gated else len(weight)
    out = torch.empty(num_rows, columns, dtype=dtype or x.dtype, device=x.device) if add_to is None else add_to
    num_tiles, row_tiles = columns // tiling.block_n, triton.cdiv(num_rows, tiling.block_m)
    assert add_to is None or num_tiles <= SQUARES_TILES
    squares = workspace.squares
    shape = {
        "N": columns, "K": inner, "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k,
        "NORM": num_squares > 0, "GATED": gated, "ADD": add_to is not None, "HAS_BIAS": bias is not None,
        "ACTIVATION": activation if gated else "",
        "MAX_SQUARES": triton.next_power_of_2(max(num_squares, 1)), "SQUARES_STRIDE": MAX_ROWS,
        "SCALES": "none" if scales is None else "columns" if len(scales) == 1 else "blocks",
        "num_warps": tiling.num_warps,
    }  # fmt: skip
    factors = squares if scales is None else scales
    bias = squares if bias is None else bias
    if tiling.kernel == "vector":
        skinny.vector_product[(num_tiles,)](
            x, weight, out, squares, squares, num_squares, eps, bias, factors, **shape, **pdl()
        )  # fmt: skip
        return out
    if tiling.splits > 1:
        assert not gated  # parts of `up` are not added up
        assert num_tiles * row_tiles <= COUNTERS
        assert tiling.splits * columns * row_tiles * tiling.block_m <= PARTS
    shape |= {"BLOCK_M": tiling.block_m, "SPLITS": tiling.splits, "TRIGGER": tiling.triggers}
    shape |= {"ORDER_FREE": order_free}
    scratch = (workspace.parts, workspace.counters, squares, squares, num_rows, num_squares, eps, bias, factors)
    if tiling.kernel == "ring":
        assert row_tiles == 1
        _launch_ring(x, weight, out, scratch, tiling, shape)
        return out
    skinny.product[(num_tiles, tiling.splits, row_tiles)](
        x, weight, out, *scratch, PREFETCH_BYTES=tiling.prefetch_bytes, PREFETCHES=PREFETCHES,
        num_stages=_num_stages(tiling, weight, gated=gated), **shape, **pdl(),
    )  # fmt: skip
    return out


def _launch_ring(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    scratch: tuple[Any, ...],
    tiling: Tiling,
    shape: dict[str, Any],
) -> None:
    from gapless.kernels import narrow_ring, ring  # on Hopper alone

    if shape["SCALES"] != "none":
        del shape["ORDER_FREE"]
        tiles = ring.in_tiles(weight, tiling.block_n, tiling.block_k)
        narrow = narrow_ring.narrow_product[(out.shape[1] // tiling.block_n, tiling.splits)]
        narrow(x, tiles, out, *scratch, NUM_STAGES=tiling.num_stages, **shape, launch_pdl=True)
        return
    del shape["SCALES"]
    num_ctas = tiling.splits if tiling.cluster else 1
    tiles = ring.in_tiles(weight, tiling.block_n, tiling.block_k, num_ctas)
    grid = (out.shape[1] // tiling.block_n, tiling.splits // num_ctas)
    ring.ring_product[grid](
        x, tiles, out, *scratch[:-1], NUM_STAGES=tiling.num_stages, ROW_STAGES=tiling.row_stages or tiling.num_stages,
        num_ctas=num_ctas, **shape, launch_pdl=True,
    )  # fmt: skip


def _num_stages(tiling: Tiling, weight: torch.Tensor, *, gated: bool) -> int:
    """The tiling's, or what this GPU has room for: many have less shared memory than the one it was measured on."""
    limit = shared_memory_bytes()
    return (
        tiling.num_stages
        if limit is None
        else tiling.stages_within(limit - SPARE_BYTES, gated=gated, number_bytes=min(weight.itemsize, 2))
    )
