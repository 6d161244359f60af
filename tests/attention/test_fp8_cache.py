"""Attention over a KV cache of FP8: the reference against dense attention, the kernels against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batches import BLOCK_SIZE, DEVICE, SHAPES, Shape, make_batch

from gapless.attention.base import FP8
from gapless.attention.reference import ReferenceAttention
from gapless.models.rope import RotaryRotation
from gapless.models.spec import AttentionSpec, KVUnits
from interpreted_fp8 import mend_casts

UNITS = KVUnits(k=0.25, v=3.0)
OPTIONS = {"window": 9, "soft_cap": 5.0, "sinks": True}


def draw_step(shape: Shape, spec: AttentionSpec, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The batch, a pool of FP8, heads and their rotation."""
    generator = torch.Generator().manual_seed(len(shape.decode_lengths) * 31 + shape.head_dim)
    batch, num_slots = make_batch(shape, generator)
    num_tokens = len(batch.slots[0])

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE, dtype)

    pool = draw(num_slots, 2 * shape.num_kv_heads, shape.head_dim).to(FP8)
    heads = draw(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    heads[:, -1] *= 2000  # of the last head's values: beyond what FP8 has, so the largest number is stored
    weight = draw(shape.num_heads + shape.num_kv_heads, shape.head_dim) if shape.norm else None
    sinks = draw(shape.num_heads) if spec.sinks else None
    rotation = RotaryRotation(draw(num_tokens, 2, shape.head_dim), weight, 1e-5, sinks)
    return batch, pool, heads, rotation


@pytest.mark.parametrize("shape", SHAPES[:5])
def test_the_reference_attends_to_what_the_cache_stands_for(shape: Shape) -> None:
    spec = shape.spec()
    batch, pool, heads, rotation = draw_step(shape, spec, torch.float32)
    found = ReferenceAttention([pool], BLOCK_SIZE, [spec], units=[UNITS]).begin(batch)(0, heads, rotation)

    factors = torch.tensor([UNITS.k, UNITS.v], device=DEVICE).repeat_interleave(shape.num_kv_heads)[:, None]
    wide = pool.float() * factors
    turned = rotation.apply(heads[:, : -shape.num_kv_heads])[:, shape.num_heads :]
    new = torch.cat((turned, heads[:, -shape.num_kv_heads :]), dim=1)
    stored = (new / factors).clamp(-448, 448)
    error = (wide[batch.slots[0]] / factors - stored).abs()
    assert (error <= stored.abs() / 16 + 2**-10).all()  # e4m3: half a step of three bits, or of the smallest number
    # a cache that holds those numbers in float32, and heads that bring them, give the same
    plain = ReferenceAttention([wide.clone()], BLOCK_SIZE, [spec])
    plain._store = lambda layer, slots, kv: None  # type: ignore[method-assign]
    torch.testing.assert_close(plain.begin(batch)(0, heads, rotation), found, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (SHAPES[0], {}),
        (SHAPES[5], {}),  # keys are loaded ahead
        (SHAPES[2], OPTIONS),
        (Shape(2, 1, 16, (90,), ((63, 40),)), {}),  # keys that all tokens of a chunk see
    ],
)
def test_the_kernels_equal_the_reference(
    shape: Shape, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    mend_casts(monkeypatch)
    from gapless.attention.triton import TritonAttention

    spec = replace(shape.spec(), **changes)
    batch, pool, heads, rotation = draw_step(shape, spec, torch.float16)
    pools = [pool.clone(), pool.clone()]
    wide = [None if x is None else x.float() for x in (rotation.cos_sin, rotation.norm_weight, rotation.sinks)]
    exact = RotaryRotation(wide[0], wide[1], 1e-5, wide[2])
    expected = ReferenceAttention(pools[:1], BLOCK_SIZE, [spec], units=[UNITS]).begin(batch)(0, heads.float(), exact)
    attention = TritonAttention(pools[1:], BLOCK_SIZE, [spec], len(batch.tables[0]), shape.num_cores, units=[UNITS])
    attend = attention.begin(batch)
    for _ in range(2):
        found = attend(0, heads, rotation)
        error = (found.float() - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.max() < 0.01, error
    # rounding to FP8 may fall on the other side where float16 and float32 differ
    steps = pools[1].view(torch.uint8).int() - pools[0].view(torch.uint8).int()
    assert steps.abs().max() <= 1
    assert (steps != 0).float().mean() < 0.001
