"""The Triton kernels, under the interpreter where there is no GPU, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from batches import BLOCK_SIZE, DEVICE, SHAPES, Shape, attention_spec, make_batch

from gapless.attention.reference import ReferenceAttention
from gapless.attention.triton import TritonAttention
from gapless.models.rope import RotaryRotation


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_reference(shape: Shape) -> None:
    generator = torch.Generator().manual_seed(len(shape.decode_lengths) * 31 + shape.head_dim)
    batch, num_slots = make_batch(shape, generator)
    num_tokens = len(batch.slots[0])

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE)

    pool = draw(num_slots, 2 * shape.num_kv_heads, shape.head_dim)
    heads = draw(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    weight = draw(shape.num_heads + shape.num_kv_heads, shape.head_dim) if shape.norm else None
    rotation = RotaryRotation(draw(num_tokens, 2, shape.head_dim), weight, 1e-5)
    pools = [pool.clone(), pool.clone()]
    expected = ReferenceAttention(pools[:1], BLOCK_SIZE, [shape.spec()]).begin(batch)(0, heads, rotation)
    triton = TritonAttention(pools[1:], BLOCK_SIZE, [shape.spec()], len(batch.tables[0]), shape.num_cores)
    attend = triton.begin(batch)
    for _ in range(2):  # the second time finds the counters as the first left them
        found = attend(0, heads, rotation)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(pools[1], pools[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"scale": 0.3, "window": 4, "soft_cap": 30.0, "sinks": True}, None),
        ({"head_dim": 512, "scale": 512**-0.5}, "the attention kernels have no heads of 512; 256 is the most"),
    ],
)
def test_what_the_kernels_cannot_do(changes: dict[str, Any], reason: str | None) -> None:
    spec = SHAPES[0].spec()
    assert TritonAttention.why_not([replace(spec, **changes), spec]) == reason


def test_splits_follow_the_number_of_rows() -> None:
    pools = [torch.zeros(4, 16, 8, device=DEVICE)]
    triton = TritonAttention(pools, BLOCK_SIZE, [attention_spec(8, 8, 8)], num_rows=256, num_cores=132)
    rows_and_splits = {1: 16, 4: 16, 5: 8, 16: 8, 17: 4, 32: 4, 64: 2, 66: 2, 67: 1, 256: 1}
    assert {count: triton.num_splits(count) for count in rows_and_splits} == rows_and_splits
    assert [count for count in range(1, 257) if triton.loads_ahead(count)] == [1, 2]


def test_both_ways_of_loading_keys_are_compared_above() -> None:
    """With one tile of keys a split, and with several."""
    ways = set()
    for shape in SHAPES:
        pools = [torch.zeros(4, 2 * shape.num_kv_heads, shape.head_dim, device=DEVICE)]
        attention = TritonAttention(pools, BLOCK_SIZE, [shape.spec()], 8, shape.num_cores)
        if count := len(shape.decode_lengths):
            ahead = attention.loads_ahead(count)
            tile = 64 if ahead else 32
            ways.add((ahead, max(shape.decode_lengths) > tile * attention.num_splits(count)))
    assert ways == {(False, False), (False, True), (True, False), (True, True)}


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype", "expected"),
    [
        (16, 8, 128, torch.bfloat16, 1),
        (16, 8, 128, torch.float32, 2),
        (16, 8, 80, torch.float32, 2),
        (9, 3, 64, torch.float32, 1),
        (32, 1, 192, torch.bfloat16, 4),
        (64, 1, 256, torch.float32, 4),
    ],
)
def test_warps_follow_what_a_program_holds(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, expected: int
) -> None:
    pools = [torch.zeros(4, 2 * num_kv_heads, head_dim, dtype=dtype, device=DEVICE)]
    specs = [attention_spec(num_heads, num_kv_heads, head_dim)]
    assert TritonAttention(pools, BLOCK_SIZE, specs, 8, 132).num_warps == expected


@pytest.mark.parametrize("head_dim", [16, 24])
def test_keys_that_all_tokens_see_need_no_mask(head_dim: int) -> None:
    """In 16 bits they are taken in apart from the others: tiles of 64 tokens after none, one and several of them."""
    shape = Shape(4, 2, head_dim, (), ((0, 200), (63, 70), (64, 1), (191, 66)))
    generator = torch.Generator().manual_seed(3)
    batch, num_slots = make_batch(shape, generator)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, head_dim, generator=generator).to(DEVICE, torch.float16)

    pool, heads = draw(num_slots, 4), draw(len(batch.slots[0]), 8)
    rotation = RotaryRotation(draw(len(batch.slots[0]), 2), None, 1e-5)
    pools = [pool.clone(), pool.clone()]
    expected = ReferenceAttention(pools[:1], BLOCK_SIZE, [shape.spec()]).begin(batch)(0, heads, rotation)
    attention = TritonAttention(pools[1:], BLOCK_SIZE, [shape.spec()], num_rows=4, num_cores=4)
    found = attention.begin(batch)(0, heads, rotation)
    torch.testing.assert_close(found, expected, atol=0.01, rtol=0.01)
