"""The attention of chunks, for Hopper and for any GPU, against plain torch in float32; what it must not read is NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from gapless.kernels.score_options import ScoreOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FIRST, PADDING, EMPTY = 7, 9, 3  # decode rows before the chunks, tokens behind them, entries without tokens


@dataclass(frozen=True)
class Shape:
    chunks: tuple[tuple[int, int], ...]  # (start, count)
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False

    def options(self, scale: float) -> ScoreOptions:
        return ScoreOptions(scale * 1.4426950408889634, self.window, self.soft_cap)

    def first_seen(self, chunk: int) -> int:
        return max(0, self.chunks[chunk][0] + 1 - self.window) if self.window else 0


ODD = ((0, 131), (5, 77), (200, 3), (127, 65), (0, 64), (16, 128))
HOPPER = {
    "one token": Shape(((0, 1),)),
    "odd lengths": Shape(ODD),
    "a long prompt": Shape(((0, 3001),)),
    "a prefix of 100,000 tokens": Shape(((100_000, 190),), num_heads=16),
    "many chunks": Shape(tuple((i, 1 + 5 * i) for i in range(40)), num_heads=16),
    "heads of 64": Shape(ODD, head_dim=64),
    "heads of 256": Shape(ODD, num_heads=16, head_dim=256),
    "a head for each KV head": Shape(ODD, num_heads=8),
    "five heads for each KV head": Shape(ODD, num_heads=10, num_kv_heads=2),
    "blocks of 8": Shape(ODD, block_size=8),
    "blocks of 64 in float16": Shape(ODD, block_size=64, dtype=torch.float16),
    "a window": Shape((*ODD, (0, 3001), (9000, 700)), window=1024),
    "a short window": Shape((*ODD, (3000, 200)), window=16, num_heads=8),
    "a window of 100": Shape((*ODD, (3000, 200)), window=100, num_heads=8),
    "a soft cap": Shape(ODD, soft_cap=3.0),
    "sinks": Shape(ODD, sinks=True, head_dim=64),
    "all of them": Shape((*ODD, (700, 300)), head_dim=256, num_heads=16, window=130, soft_cap=4.0, sinks=True),
}
OTHERS = {
    "heads of 80": Shape(ODD, head_dim=80),
    "blocks of 24": Shape(ODD, block_size=24, dtype=torch.float16),
    "a window for any": Shape((*ODD, (3000, 200)), window=100, head_dim=80),
    "all for any": Shape((*ODD, (700, 300)), head_dim=96, window=7, soft_cap=4.0, sinks=True),
}


class Scene:
    """Chunks of rows whose blocks lie anywhere in a pool. What no row wrote is NaN, and so is the output before."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.generator = torch.Generator("cuda").manual_seed(len(shape.chunks))
        size, lengths = shape.block_size, [start + count for start, count in shape.chunks]
        used = [-(-length // size) for length in lengths]
        unused = sum(used)
        blocks = torch.randperm(unused, generator=self.generator, device="cuda")
        self.sinks = 2 * torch.randn(shape.num_heads, generator=self.generator, device="cuda").to(shape.dtype)
        self.blocks = torch.full((len(lengths), max(used)), unused, dtype=torch.int64, device="cuda")
        for row, some in enumerate(blocks.split(used)):
            self.blocks[row, : len(some)] = some
        self.slots = [self._slots(row, length) for row, length in enumerate(lengths)]
        written = torch.cat(self.slots)
        pool = torch.full((unused * size + size, 2 * shape.num_kv_heads, shape.head_dim), float("nan"), device="cuda")
        pool[written] = torch.randn(pool[written].shape, generator=self.generator, device="cuda")
        for row, slots in enumerate(self.slots):
            before = shape.first_seen(row) // size
            pool[slots[: before * size]] = float("nan")
            self.blocks[row, :before] = unused
        self.pool = pool.to(shape.dtype)
        counts = [count for _, count in shape.chunks]
        self.offsets = [FIRST + sum(counts[:i]) for i in range(len(counts) + 1)]
        sizes = (self.offsets[-1] + PADDING, shape.num_heads, shape.head_dim)
        self.q = torch.randn(sizes, generator=self.generator, device="cuda").to(shape.dtype)
        self.out = torch.full_like(self.q, float("nan"))

    def _slots(self, row: int, length: int) -> torch.Tensor:
        place = torch.arange(length, device="cuda")
        return self.blocks[row, place // self.shape.block_size] * self.shape.block_size + place % self.shape.block_size

    def tiles(self, tokens_a_tile: int) -> torch.Tensor:
        from gapless.kernels.chunk_tiles import cut

        starts = [start for start, _ in self.shape.chunks] + [0] * EMPTY
        ends = [start + count for start, count in self.shape.chunks] + [0] * EMPTY
        rows = [*range(len(self.shape.chunks)), *([0] * EMPTY)]
        offsets = self.offsets[:-1] + [self.offsets[-1]] * EMPTY
        tensors = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (rows, offsets, starts, ends)]
        return cut(*tensors, num_tokens=len(self.q), tokens_a_tile=tokens_a_tile)

    def expected(self, chunk: int, head: int, scale: float) -> torch.Tensor:
        """Of all tokens of a chunk, in float32."""
        start, count = self.shape.chunks[chunk]
        kv_head = head * self.shape.num_kv_heads // self.shape.num_heads
        k, v = (self.pool[self.slots[chunk], kv_head + i * self.shape.num_kv_heads].float() for i in range(2))
        q = self.q[self.offsets[chunk] : self.offsets[chunk + 1], head].float()
        place = torch.arange(start + count, device="cuda")
        scores = q @ k.T * scale
        if cap := self.shape.soft_cap:
            scores = (scores / cap).tanh() * cap
        behind = place[start:, None] - place[None]
        hidden = (behind < 0) | (behind >= (self.shape.window or len(place)))
        scores = scores.masked_fill(hidden, -float("inf"))
        if self.shape.sinks:
            scores = torch.cat((scores, self.sinks[head].float().expand(count, 1)), dim=1)
        return scores.softmax(dim=1)[:, : len(place)] @ v.nan_to_num()


def for_hopper(shape: Shape, scale: float) -> Callable[[Scene, Scene], None]:
    """The kernel in Gluon: queries and tiles of one scene over the pool of another."""
    from gapless.attention.triton import hopper_prefill

    kernel = hopper_prefill()
    pool = torch.empty(shape.block_size, 2 * shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
    if kernel is None or not kernel.is_for(pool, shape.block_size):
        pytest.skip("needs Hopper")
    attend, options = kernel(pool, shape.block_size, shape.num_heads, 132), shape.options(scale)

    def run(scene: Scene, of: Scene) -> None:
        tiles = scene.tiles(attend.tokens_a_tile)
        attend(scene.q, of.pool, of.blocks, tiles, scene.out, options, of.sinks if shape.sinks else None)

    return run


def for_any(shape: Shape, scale: float) -> Callable[[Scene, Scene], None]:
    """The kernel in Triton."""
    from triton import next_power_of_2

    from gapless.kernels.chunk_tiles import SIZE
    from gapless.kernels.prefill import prefill

    options = shape.options(scale)

    def attend(scene: Scene, of: Scene) -> None:
        tiles = scene.tiles(64)
        prefill[(shape.num_heads, len(tiles) - 1)](
            scene.q, of.sinks, of.pool, of.blocks, tiles, scene.out, options.scale, options.v_unit, of.blocks.stride(0),
            NUM_HEADS=shape.num_heads, NUM_KV=shape.num_kv_heads, HEAD_DIM=shape.head_dim,
            BLOCK_D=next_power_of_2(shape.head_dim), BLOCK_SIZE=shape.block_size, BLOCK_M=64, BLOCK_N=64,
            PRECISION="tf32", SIZE=SIZE.value, **options.constants(has_sinks=shape.sinks), num_warps=4, num_stages=2,
        )  # fmt: skip

    return attend


@pytest.mark.parametrize(
    ("name", "make"),
    [*((name, for_hopper) for name in HOPPER), *((name, for_any) for name in ("odd lengths", *OTHERS))],
)
def test_equals_torch(name: str, make: Callable[[Shape, float], Callable[[Scene, Scene], None]]) -> None:
    shape = (HOPPER | OTHERS)[name]
    scale = 1.7 * shape.head_dim**-0.5
    attend, scene = make(shape, scale), Scene(shape)
    attend(scene, scene)
    torch.backends.cuda.matmul.allow_tf32 = False
    limit = 8e-3 if shape.dtype == torch.bfloat16 else 1e-3
    for chunk in range(len(shape.chunks)):
        for head in range(shape.num_heads):
            expected = scene.expected(chunk, head, scale)
            found = scene.out[scene.offsets[chunk] : scene.offsets[chunk + 1], head].float()
            error = (found - expected).norm(dim=1) / expected.norm(dim=1)
            assert error.max() < limit, (chunk, head, int(error.argmax()), float(error.max()))
    assert scene.out[:FIRST].isnan().all()  # of decode rows, and behind the last chunk: not its business
    assert scene.out[scene.offsets[-1] :].isnan().all()


@pytest.mark.parametrize(("make", "window"), [(for_hopper, 0), (for_hopper, 150), (for_any, 0)])
def test_tokens_alone_are_as_in_company(
    make: Callable[[Shape, float], Callable[[Scene, Scene], None]], window: int
) -> None:
    """Bit for bit: a token's sums do not depend on the chunk that it came in.

    Not so in the kernel for any GPU with a window: tiles at its edge have code of their own, which may round otherwise.
    """
    length = 700
    whole = Scene(Shape(((0, length),), num_heads=16, window=window))
    attend = make(whole.shape, 0.1)
    attend(whole, whole)
    for start, count in ((length - 1, 1), (333, 100), (128, 500)):
        part = Scene(Shape(((start, count),), num_heads=16))
        part.q[FIRST : FIRST + count] = whole.q[FIRST + start : FIRST + start + count]
        attend(part, whole)
        assert torch.equal(part.out[FIRST : FIRST + count], whole.out[FIRST + start : FIRST + start + count])
