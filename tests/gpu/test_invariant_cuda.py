"""Batch-invariant products, norms and attention on a GPU: bits do not depend on the batch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

from gapless.attention.base import AttentionBatch, Span
from gapless.attention.invariant import InvariantAttention
from gapless.models.invariant_layers import InvariantLayers
from gapless.models.layers import GatedWeights, Norm
from gapless.models.linear import plain
from gapless.models.rope import RotaryRotation
from gapless.models.spec import AttentionSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SIZES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 128, 129, 200, 255, 256, 257, 300)
BLOCK_SIZE = 16


def draw(*size: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*size, generator=generator, device="cuda").to(dtype)


@dataclass(frozen=True)
class Sizes:
    hidden: int
    qkv: int
    heads: int
    inner: int
    vocab: int
    bias: bool = False


MODELS = [
    Sizes(1024, 4096, 2048, 3072, 2000),
    Sizes(4096, 6144, 4096, 12288, 70_000),
    Sizes(576, 960, 576, 1536, 49_152),
    Sizes(896, 1152, 896, 4864, 1_001, bias=True),
    Sizes(2048, 4096, 2048, 6144, 1_024),
    Sizes(100, 150, 100, 260, 333),
]


@pytest.mark.parametrize("sizes", MODELS, ids=str)
def test_rows_do_not_know_their_batch(sizes: Sizes) -> None:
    """Through the parts of a layer, in batches of 1 to 300 rows and at several places in them."""
    make = InvariantLayers(torch.device("cuda"), fused=True)
    norms = [Norm(1 + 0.1 * draw(sizes.hidden, seed=i), 1e-6) for i in range(3)]
    table = draw(300, sizes.hidden, seed=3)
    embed = make.embed(plain(table))

    def weight(columns: int, inner: int, seed: int) -> torch.Tensor:
        return draw(columns, inner, seed=seed) / inner**0.5

    qkv_bias = draw(sizes.qkv, seed=4) if sizes.bias else None
    qkv = make.norm_linear(norms[0], plain(weight(sizes.qkv, sizes.hidden, 5)), qkv_bias)
    out = make.add_linear(plain(weight(sizes.hidden, sizes.heads, 6)), None)
    both = [plain(weight(sizes.inner, sizes.hidden, seed)) for seed in (7, 8)]
    gate = make.norm_gated(norms[1], GatedWeights(both[0], both[1], None, None))
    down = make.add_linear(plain(weight(sizes.hidden, sizes.inner, 9)), None)
    head = make.linear(plain(weight(sizes.vocab, sizes.hidden, 10)))

    def run(ids: torch.Tensor) -> list[torch.Tensor]:
        hidden = embed(ids)
        heads = qkv(hidden)
        hidden = out(heads[:, : sizes.heads].contiguous(), hidden)
        after = hidden.values.clone()
        inner = gate(hidden)
        hidden = down(inner, hidden)
        again = qkv(hidden)
        return [heads, after, inner, hidden.values, again, head(make.norm(norms[2])(hidden))]

    ids = torch.arange(300, device="cuda")
    whole = run(ids)
    assert all(bool(part.isfinite().all()) for part in whole)
    for size in SIZES:
        for first in {0, 300 - size, 137 if size <= 163 else 0}:
            parts = run(ids[first : first + size])
            different = [i for i, part in enumerate(parts) if not torch.equal(part, whole[i][first : first + size])]
            assert not different, f"{size} rows from {first}: parts {different} differ"


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "has_norm", "dtype"),
    [
        (16, 8, 128, True, torch.bfloat16),
        (32, 8, 128, False, torch.bfloat16),
        (9, 3, 64, False, torch.bfloat16),
        (4, 4, 80, True, torch.bfloat16),
        (8, 1, 256, False, torch.bfloat16),
        (4, 2, 64, True, torch.float16),
        (4, 2, 32, True, torch.float32),
    ],
)
def test_tokens_do_not_know_their_batch(
    num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool, dtype: torch.dtype
) -> None:
    """Tokens of a row of 2500: as one chunk, as many, and as decode rows in batches of several sizes."""
    length = 2500
    num_blocks = -(-length // BLOCK_SIZE)
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))[None].cuda()
    pool = torch.full((num_blocks * BLOCK_SIZE, 2 * num_kv_heads, head_dim), float("nan"), dtype=dtype, device="cuda")
    heads = draw(length, num_heads + 2 * num_kv_heads, head_dim, seed=2, dtype=dtype)
    heads[::97, -num_kv_heads:] *= 1000  # values that would be seen if a mask leaked
    angles = draw(length, 2, head_dim, seed=3, dtype=dtype)
    norm = 1 + 0.1 * draw(num_heads + num_kv_heads, head_dim, seed=4, dtype=dtype) if has_norm else None
    spec = AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5, rope=None)
    attention = InvariantAttention([pool], BLOCK_SIZE, [spec], 300, 132, length)

    def run(decodes: list[int], chunks: list[tuple[int, int]]) -> torch.Tensor:
        """Of tokens at these places, then of the chunks' tokens (start, count), all of one row."""
        spans, places = [], list(decodes)
        for start, count in chunks:
            spans.append(Span(len(places), start, count))
            places += range(start, start + count)
        at = torch.tensor(places, device="cuda")
        empty = Span(len(places), 0, 0)  # an entry that is not used

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cuda")

        batch = AttentionBatch(
            slots=(blocks[0, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE,),
            tables=(blocks,),
            decode_rows=torch.zeros(len(decodes), dtype=torch.int64, device="cuda"),
            decode_lengths=at[: len(decodes)] + 1,
            max_decode_length=length,
            num_chunk_tokens=sum(span.count for span in spans),
            chunk_rows=ints([0] * (len(spans) + 1)),
            chunk_offsets=ints([span.offset for span in (*spans, empty)]),
            chunk_starts=ints([span.start for span in (*spans, empty)]),
            chunk_ends=ints([span.length for span in (*spans, empty)]),
            chunks=tuple(spans),
        )
        return attention.begin(batch)(0, heads[at], RotaryRotation(angles[at], norm, 1e-6))

    whole = run([], [(0, length)])
    assert bool(whole.isfinite().all())
    for size in (1, 63, 64, 65, 300, 1023, 1024, 2000):
        parts = [run([], [(start, min(size, length - start))]) for start in range(length // 2, length, size)]
        assert torch.equal(torch.cat(parts), whole[length // 2 :]), f"chunks of {size}"
    several = [(start, 130) for start in range(100, 2300, 200)]
    expected = torch.cat([whole[start : start + count] for start, count in several])
    assert torch.equal(run([], several), expected)
    draws = torch.randint(length, (300,), generator=torch.Generator().manual_seed(5)).tolist()
    places = [0, 1, 63, 64, 127, 128, 129, 1023, 1024, 2047, 2048, 2049, length - 1, *draws][:300]
    for size in (1, 2, 5, 16, 33, 66, 67, 133, 300):
        for first in range(0, 300 if size > 5 else 40, size):
            chosen = places[first : first + size]
            assert torch.equal(run(chosen, []), whole[chosen]), f"{size} decode rows from {first}"
    assert torch.equal(run(places[:20], several), torch.cat((whole[places[:20]], expected)))
