"""Experts on an NVIDIA GPU, launched: from the router's logits to what the chosen experts add to the stream.

Of few rows the time is that of reading the chosen experts' weights, each once. A single row has two kernels of its own.
More rows are grouped by expert on the device, so a captured step routes anew at each replay.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from gapless.kernels import experts, narrow_experts
from gapless.kernels import one_row_experts as one_row
from gapless.kernels.launch import AMPERE, generation, pdl, shared_memory_bytes
from gapless.kernels.products import SPARE_BYTES, SQUARES_TILES
from gapless.kernels.tilings import MAX_ROWS

COMBINED = 512  # columns that one program adds up


@dataclass(frozen=True, slots=True)
class OneRow:
    """How the experts of one row are cut. With so few registers, several programs stream side by side on a core."""

    columns: int = 8  # of a tile of router and down
    inner: int = 256
    registers: int = 128  # of a thread, for down
    early: int = 12  # tiles of down that are requested before the wait
    most_tiles: int = 64  # that a program may take, each of them code of its own
    gate_columns: int = 8
    gate_warps: int = 4
    gate_registers: int = 168


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """How products of grouped pairs are cut."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 4


@dataclass(frozen=True, slots=True)
class ExpertTilings:
    """Of gate and up, and of down."""

    gate: ExpertTiling
    down: ExpertTiling


ONE = OneRow()
FEW = ExpertTilings(ExpertTiling(16, 32, 128, num_stages=5), ExpertTiling(16, 64, 128, num_stages=4))
SOME = ExpertTilings(ExpertTiling(64, 64, 64), ExpertTiling(64, 128, 64))
MANY = ExpertTilings(ExpertTiling(128, 128, 64, 8, 4), ExpertTiling(128, 128, 64, 8, 4))
INVARIANT = ExpertTilings(ExpertTiling(64, 64, 64), ExpertTiling(64, 64, 64))  # for any number of rows
EXACT = ExpertTilings(ExpertTiling(16, 32, 32, num_stages=2), ExpertTiling(16, 32, 32, num_stages=2))  # float32
# of numbers of 4 bits, which are packed for tiles of this inner size
NARROW_INNER = 128
NARROW_FEW = ExpertTilings(ExpertTiling(16, 32, NARROW_INNER, 4, 6), ExpertTiling(16, 32, NARROW_INNER, 4, 6))
NARROW_MANY = ExpertTilings(ExpertTiling(64, 64, NARROW_INNER, 4, 3), ExpertTiling(64, 64, NARROW_INNER, 4, 3))


@dataclass(frozen=True, slots=True, eq=False)
class ExpertStack:
    """The weights of all experts of one layer, and how the router chooses among them.

    The last `num_shared` are parts of one that every row has: behind the router's logits is one more, its gate's.
    With scales, numbers are of 4 bits, as kernels/narrow_experts says, and `both` and `down` are bytes.
    """

    both: Tensor  # [count, 2 * inner, hidden]: gate, then up
    down: Tensor  # [count, hidden, inner]
    both_scales: Tensor | None = None
    down_scales: Tensor | None = None
    _: KW_ONLY
    both_bias: Tensor | None  # [count, 2 * inner]
    down_bias: Tensor | None  # [count, hidden]
    router_bias: Tensor | None  # [count]
    num_chosen: int
    is_normalized: bool  # shares of the chosen add up to 1
    is_clamped: bool  # the activation of GPT-OSS, in place of SiLU
    num_shared: int = 0

    @property
    def count(self) -> int:
        return len(self.both)

    @property
    def num_pairs(self) -> int:
        """Of each row."""
        return self.num_chosen + self.num_shared

    def lists(self) -> dict[str, Any]:
        """For kernels that know pairs and their experts."""
        return {"E": self.count, "BLOCK_E": triton.next_power_of_2(self.count), "TOP": self.num_pairs}

    def choice(self, num_logits: int) -> dict[str, Any]:
        """For kernels that choose, from so many logits of a row."""
        routed = {"E": self.count - self.num_shared, "TOP": self.num_chosen}
        return self.lists() | routed | {"SHARED": self.num_shared, "LOGITS": num_logits}


@dataclass(frozen=True, slots=True)
class ExpertStream:
    """The residual stream that experts read and add to, and the sums of squares that kernels leave for norms."""

    values: Tensor  # [n, hidden]
    squares: Tensor  # of the workspace
    num_squares: int  # sums for each row; 0: x is normalized already
    eps: float


def tilings_for(num_rows: int, stack: ExpertStack, *, invariant: bool) -> ExpertTilings:
    """By the mean number of rows of an expert."""
    if stack.both.dtype == torch.float32:
        return EXACT
    is_narrow = stack.both_scales is not None
    if invariant:
        return NARROW_MANY if is_narrow else INVARIANT
    mean = num_rows * stack.num_pairs / stack.count
    if is_narrow:
        return NARROW_FEW if mean <= 16 else NARROW_MANY
    return FEW if mean <= 16 else SOME if mean <= 96 else MANY


def add_experts(
    x: Tensor, logits: Tensor, stack: ExpertStack, stream: ExpertStream, counts: Tensor, *, invariant: bool = False
) -> int:
    """Add what the chosen experts make of x [n, hidden] to the stream, in place. How many sums of squares are left.

    logits [n, at least as many as experts are chosen from, and one for a shared one] float32 of the router.
    counts [count] int32, zero, and zero again afterwards.
    """
    num_rows, size = x.shape
    tilings = tilings_for(num_rows, stack, invariant=invariant)
    num_pairs = num_rows * stack.num_pairs
    members = torch.empty(stack.count, num_rows, dtype=torch.int32, device=x.device)
    shares = torch.empty(num_pairs, dtype=torch.float32, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    bias, has_bias = _or(stack.router_bias, logits)
    experts.route[(num_rows,)](
        logits, bias, counts, members, shares, stream.squares, scales, num_rows, stream.num_squares, stream.eps,
        K=size, NORMALIZED=stack.is_normalized, HAS_BIAS=has_bias, **_norm(stream), **stack.choice(logits.shape[1]),
        num_warps=4, **pdl(),
    )  # fmt: skip
    lists = (counts, members)
    inner = _grouped(x, stack, tilings.gate, stream, lists, scales, num_rows, x.dtype, gated=True)
    # few rows can afford parts that are not rounded; a row must not see how many there are where it is to be invariant
    exact = torch.float32 if num_rows <= MAX_ROWS and not invariant else x.dtype
    parts = _grouped(inner, stack, tilings.down, stream, lists, shares, num_rows, exact, gated=False)
    return _combine(parts, stack, stream, counts)


def _grouped(
    x: Tensor,
    stack: ExpertStack,
    tiling: ExpertTiling,
    stream: ExpertStream,
    lists: tuple[Tensor, Tensor],
    factors: Tensor,
    num_rows: int,
    dtype: torch.dtype,
    *,
    gated: bool,
) -> Tensor:
    """One product of all pairs: into gate and up, activated, or down from there."""
    weight, bias = (stack.both, stack.both_bias) if gated else (stack.down, stack.down_bias)
    scales = stack.both_scales if gated else stack.down_scales
    columns = weight.shape[1] // 2 if gated else weight.shape[1]
    num_pairs = num_rows * stack.num_pairs
    out = torch.empty(num_pairs, columns, dtype=dtype, device=x.device)
    num_tiles = min(num_pairs, triton.cdiv(num_pairs, tiling.block_m) + stack.count)
    stage_bytes = x.element_size() * tiling.block_k * (tiling.block_m + tiling.block_n * (2 if gated else 1))
    limit = shared_memory_bytes()
    fitting = tiling.num_stages if limit is None else max(1, (limit - SPARE_BYTES) // stage_bytes)
    bias, has_bias = _or(bias, out)
    grid = num_tiles, triton.cdiv(columns, tiling.block_n)
    sizes = {
        "N": columns, "K": x.shape[1], "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k,
        "GATED": gated, "CLAMPED": stack.is_clamped, "HAS_BIAS": has_bias,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tiling.num_warps, "num_stages": min(tiling.num_stages, fitting),
    }  # fmt: skip
    if scales is not None:
        assert stream.num_squares == 0
        narrow_experts.grouped_narrow[grid](
            x, weight, scales, bias, out, *lists, factors, num_rows,
            PACKED=2 * weight.shape[2], IN_PAIRS=x.dtype == torch.bfloat16 and generation() >= AMPERE,
            **sizes, **stack.lists(), **pdl(),
        )  # fmt: skip
        return out
    experts.grouped[grid](
        x, weight, bias, out, *lists, factors, num_rows,
        NORM=gated and stream.num_squares > 0, **sizes, **stack.lists(), **pdl(),
    )  # fmt: skip
    return out


def pack_narrow(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4 as checkpoints have it, as kernels read it: with the halves of bytes 32 numbers apart, and filled up.

    blocks [rows, groups, 16]: bytes of two numbers that lie side by side, the first in the low half; scales [rows,
    groups]. Returns [rows, packed / 2] and int32 [rows, packed / 128], where packed is a multiple of `NARROW_INNER`.
    """
    more = -scales.shape[1] % (NARROW_INNER // 32)
    blocks, scales = functional.pad(blocks, (0, 0, 0, more)), functional.pad(scales, (0, more))
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).view(len(blocks), -1, 2, 32)
    return (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1), scales.contiguous().view(torch.int32)


def _combine(parts: Tensor, stack: ExpertStack, stream: ExpertStream, counts: Tensor) -> int:
    num_rows, size = stream.values.shape
    num_tiles = triton.cdiv(size, COMBINED)
    leaves = num_rows <= MAX_ROWS
    experts.combine[(num_rows, num_tiles)](
        parts, stream.values, counts, stream.squares, N=size, BLOCK_N=min(COMBINED, triton.next_power_of_2(size)),
        SQUARES=leaves, SQUARES_STRIDE=MAX_ROWS, **stack.lists(), num_warps=4, **pdl(),
    )  # fmt: skip
    return num_tiles if leaves else 0


def fits_one(stack: ExpertStack) -> bool:
    """Whether the kernels for one row can take these experts."""
    _, size, inner = stack.down.shape
    if stack.down_bias is not None or stack.both_bias is not None or stack.both_scales is not None:
        return False
    divides = size % max(ONE.columns, ONE.inner) == 0 and inner % max(ONE.gate_columns, ONE.inner) == 0
    short = stack.num_pairs * inner // ONE.inner <= ONE.most_tiles and size // ONE.inner <= ONE.most_tiles // 2
    return divides and short and size // ONE.columns <= SQUARES_TILES


def add_of_one(x: Tensor, router: Tensor, stack: ExpertStack, stream: ExpertStream, counts: Tensor) -> int:
    """What `add_experts` does, for one row [1, hidden], whose logits are computed here; the norm is fused in."""
    assert stream.num_squares > 0
    _, size, columns = stack.down.shape
    logits = torch.empty(len(router), dtype=torch.float32, device=x.device)
    shares = torch.empty(stack.num_pairs, dtype=torch.float32, device=x.device)
    chosen = torch.empty(stack.num_pairs, dtype=torch.int32, device=x.device)
    inner = torch.empty(stack.num_pairs, columns, dtype=x.dtype, device=x.device)
    bias, has_bias = _or(stack.router_bias, logits)
    norm = _norm(stream)
    norm.pop("NORM")
    squares = (stream.squares, stream.num_squares, stream.eps)
    one_row.choose_of_one[(triton.cdiv(len(router), ONE.columns),)](
        x, router, bias, logits, chosen, shares, counts, *squares,
        K=size, BLOCK_N=ONE.columns, BLOCK_K=ONE.inner, NORMALIZED=stack.is_normalized, HAS_BIAS=has_bias,
        **norm, **stack.choice(len(router)), num_warps=8, **pdl(),
    )  # fmt: skip
    one_row.gate_of_one[(columns // ONE.gate_columns, stack.num_pairs)](
        x, stack.both, inner, chosen, shares, *squares,
        N=columns, K=size, BLOCK_N=ONE.gate_columns, BLOCK_K=ONE.inner, CLAMPED=stack.is_clamped, **norm,
        num_warps=ONE.gate_warps, maxnreg=ONE.gate_registers, **pdl(),
    )  # fmt: skip
    num_tiles = size // ONE.columns
    one_row.down_of_one[(num_tiles,)](
        inner, stack.down, stream.values, chosen, stream.squares,
        N=size, K=columns, TOP=stack.num_pairs, BLOCK_N=ONE.columns, BLOCK_K=ONE.inner,
        EARLY=min(ONE.early, inner.numel() // ONE.inner), SQUARES_STRIDE=MAX_ROWS, num_warps=8,
        maxnreg=ONE.registers, **pdl(),
    )  # fmt: skip
    return num_tiles


def _norm(stream: ExpertStream) -> dict[str, Any]:
    most = triton.next_power_of_2(max(stream.num_squares, 1))
    return {"NORM": stream.num_squares > 0, "MAX_SQUARES": most, "SQUARES_STRIDE": MAX_ROWS}


def _or(wanted: Tensor | None, other: Tensor) -> tuple[Tensor, bool]:
    """A tensor that may be missing, and whether it is there: kernels need some address."""
    return (other, False) if wanted is None else (wanted, True)
