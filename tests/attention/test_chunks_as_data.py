"""Chunks that only the device knows: empty entries, a bound in place of a count, tokens behind the last chunk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from batches import BLOCK_SIZE, DEVICE, Shape, make_batch

from gapless.attention.base import AttentionBatch
from gapless.attention.reference import ReferenceAttention
from gapless.attention.triton import TritonAttention
from gapless.models.rope import RotaryRotation

SHAPES = {
    "one token": Shape(4, 2, 16, (), ((0, 1),)),
    "one token beside decode rows": Shape(4, 2, 16, (9, 70), ((0, 1),), norm=True),
    "odd lengths": Shape(4, 1, 16, (3,), ((0, 131), (5, 77), (3, 3))),
    "ends inside of a block": Shape(2, 2, 20, (), ((0, BLOCK_SIZE + 1), (2, 2 * BLOCK_SIZE - 1))),
    "long prefix": Shape(4, 2, 16, (5, 6), ((700, 5), (129, 66))),
    "none": Shape(4, 2, 16, (5, 6), ()),
}
ENTRIES, ROOM, PADDING = 6, 40, 2 * BLOCK_SIZE


def as_data(batch: AttentionBatch, scratch: int) -> AttentionBatch:
    """The batch with empty entries, a bound on its tokens, padding whose keys go to `scratch`, and no host numbers."""
    num_tokens, missing = len(batch.slots[0]), ENTRIES - len(batch.chunk_rows)

    def longer(values: torch.Tensor, filler: int) -> torch.Tensor:
        packed = torch.full((1 + ENTRIES,), filler, dtype=torch.int32, device=DEVICE)
        packed[1 : 1 + len(values)] = values
        return packed[1:]  # not aligned, as views of a packed plan are

    padding = scratch + torch.arange(PADDING, device=DEVICE)
    assert missing > 0
    return replace(
        batch,
        slots=(torch.cat((batch.slots[0], padding)),),
        num_chunk_tokens=batch.num_chunk_tokens + ROOM,
        chunk_rows=longer(batch.chunk_rows, 0),
        chunk_offsets=longer(batch.chunk_offsets, num_tokens),
        chunk_starts=longer(batch.chunk_starts, 0),
        chunk_ends=longer(batch.chunk_ends, 0),
        chunks=(),
    )


@pytest.mark.parametrize("name", SHAPES)
def test_equals_reference(name: str) -> None:
    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(len(name))
    batch, num_slots = make_batch(shape, generator)
    num_tokens = len(batch.slots[0])

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE)

    pool = draw(num_slots + PADDING, 2 * shape.num_kv_heads, shape.head_dim)
    heads = draw(num_tokens + PADDING, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    weight = draw(shape.num_heads + shape.num_kv_heads, shape.head_dim) if shape.norm else None
    angles = draw(num_tokens + PADDING, 2, shape.head_dim)
    pools = [pool.clone(), pool.clone()]
    true = RotaryRotation(angles[:num_tokens], weight, 1e-5)
    reference = ReferenceAttention(pools[:1], BLOCK_SIZE, [shape.spec()])
    expected = reference.begin(batch)(0, heads[:num_tokens], true)
    attention = TritonAttention(pools[1:], BLOCK_SIZE, [shape.spec()], len(batch.tables[0]), shape.num_cores)
    found = attention.begin(as_data(batch, num_slots))(0, heads, RotaryRotation(angles, weight, 1e-5))
    torch.testing.assert_close(found[:num_tokens], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(pools[1][:num_slots], pools[0][:num_slots], atol=1e-5, rtol=1e-5)
    values = heads[num_tokens:, shape.num_heads + shape.num_kv_heads :]
    assert torch.equal(pools[1][num_slots:, shape.num_kv_heads :], values)  # of the padding
