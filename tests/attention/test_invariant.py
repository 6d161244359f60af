"""Batch-invariant attention, under the interpreter where there is no GPU: values against the reference, and bits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from batches import BLOCK_SIZE, DEVICE, SHAPES, Shape, attention_spec, make_batch

from gapless.attention.base import AttentionBatch, Span
from gapless.attention.invariant import InvariantAttention
from gapless.attention.reference import ReferenceAttention
from gapless.kernels.invariant_attention import BASE, OCTAVE, num_segments
from gapless.models.rope import RotaryRotation
from interpreted_dot import mend_dots

LONG = [
    Shape(2, 1, 16, (2300, 128, 129), ((0, 130),), num_cores=32),
    Shape(2, 1, 16, (1000,), ((200, 150),), norm=True, num_cores=1),
]


@pytest.mark.parametrize("spreads", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, LONG[0], pytest.param(LONG[1], marks=pytest.mark.slow)])
def test_equals_reference(shape: Shape, spreads: bool) -> None:
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
    num_rows = len(batch.tables[0])
    num_cores = shape.num_cores if spreads else 0
    found = InvariantAttention(pools[1:], BLOCK_SIZE, [shape.spec()], num_rows, num_cores, 4096)
    assert (found.num_splits(1) > 1) is spreads
    attend = found.begin(batch)
    for _ in range(2):  # the second time finds the counters as the first left them
        torch.testing.assert_close(attend(0, heads, rotation), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(pools[1], pools[0], atol=1e-5, rtol=1e-5)


def test_segments_grow_with_their_position() -> None:
    base, octave = BASE.value, OCTAVE.value
    assert [num_segments(length) for length in (1, base, base + 1, octave * base)] == [1, 1, 2, octave]
    assert num_segments(2 * octave * base) == 2 * octave
    assert num_segments(4 * octave * base) == 3 * octave
    assert num_segments(4 * octave * base + 1) == 3 * octave + 1
    assert num_segments(2**17) == 64


def test_a_token_does_not_know_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of a long row: as the end of a chunk, as a chunk of its own, as a decode row beside others."""
    mend_dots(monkeypatch)
    generator = torch.Generator().manual_seed(5)
    length, num_heads, num_kv_heads, head_dim = 150, 4, 2, 16
    blocks = torch.randperm(40, generator=generator)[None].to(DEVICE)
    pool = torch.randn(40 * BLOCK_SIZE, 2 * num_kv_heads, head_dim, generator=generator).to(DEVICE)
    heads = torch.randn(length, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(DEVICE)
    angles = torch.randn(length, 2, head_dim, generator=generator).to(DEVICE)

    spec = attention_spec(num_heads, num_kv_heads, head_dim)

    def last(decodes: list[int], start: int, num_cores: int = 4) -> torch.Tensor:
        """Attention of the last token, after `start` positions that the pool already has."""
        places = torch.tensor([*decodes, *range(start, length)], device=DEVICE)
        count = length - start
        ints = {name: torch.tensor([value], dtype=torch.int32, device=DEVICE) for name, value in
                {"rows": 0, "offsets": len(decodes), "starts": start, "ends": length}.items()}  # fmt: skip
        batch = AttentionBatch(
            slots=(blocks[0, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE,),
            tables=(blocks,),
            decode_rows=torch.zeros(len(decodes), dtype=torch.int64, device=DEVICE),
            decode_lengths=torch.tensor(decodes, dtype=torch.int64, device=DEVICE) + 1,
            max_decode_length=length,
            num_chunk_tokens=count,
            **{f"chunk_{name}": value[: 1 if count else 0] for name, value in ints.items()},
            chunks=(Span(len(decodes), start, count),) if count else (),
        )
        attention = InvariantAttention([pool], BLOCK_SIZE, [spec], 8, num_cores, 256)
        return attention.begin(batch)(0, heads[places], RotaryRotation(angles[places], None, 1e-5))[-1]

    whole = last([], 0)  # also writes the pool, which the others read
    assert torch.equal(whole, last([], length - 1))
    assert torch.equal(whole, last([], length - 70))
    assert torch.equal(whole, last([3, 77, 149], length, num_cores=0))
    assert torch.equal(whole, last([3, 77, 149], length, num_cores=132))
