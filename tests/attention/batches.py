"""Batches of many shapes for tests of attention: decode rows and chunks over shuffled blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from gapless.attention.base import AttentionBatch, Span
from gapless.models.spec import AttentionSpec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_SIZE = 4


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    decode_lengths: tuple[int, ...]  # of rows 0, 1, ...
    chunks: tuple[tuple[int, int], ...]  # (start, count) of the rows after them
    norm: bool = False
    num_cores: int = 4  # decides how often keys are split

    def spec(self, **changes: Any) -> AttentionSpec:
        return attention_spec(self.num_heads, self.num_kv_heads, self.head_dim, **changes)


def attention_spec(num_heads: int, num_kv_heads: int, head_dim: int, **changes: Any) -> AttentionSpec:
    """A plain one, but for the changes."""
    return replace(AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5, rope=None), **changes)


SHAPES = [
    Shape(4, 2, 16, (1, 7, 33), ()),
    Shape(4, 2, 16, (130, 5), (), num_cores=32),
    Shape(8, 1, 32, (9,), ((0, 5), (6, 9))),
    Shape(6, 6, 24, (), ((0, 70), (3, 1))),
    Shape(4, 2, 20, (70, 3), ((65, 66),), norm=True, num_cores=64),
    Shape(2, 2, 16, (257,), (), norm=True, num_cores=512),
    Shape(2, 1, 16, (1300, 1, 65), (), num_cores=32),  # several tiles a split, the first loaded ahead
    Shape(4, 2, 16, (300, 90), ()),
]


def make_batch(shape: Shape, generator: torch.Generator) -> tuple[AttentionBatch, int]:
    ends = [*shape.decode_lengths, *(start + count for start, count in shape.chunks)]
    max_blocks = -(-max(ends) // BLOCK_SIZE)
    shuffled = torch.randperm(len(ends) * max_blocks, generator=generator)
    blocks = shuffled.view(len(ends), max_blocks).to(DEVICE)
    num_decodes = len(shape.decode_lengths)
    places = [(row, length - 1) for row, length in enumerate(shape.decode_lengths)]
    spans = []
    for i, (start, count) in enumerate(shape.chunks):
        spans.append(Span(len(places), start, count))
        places += [(num_decodes + i, p) for p in range(start, start + count)]
    rows, positions = (torch.tensor(x, device=DEVICE) for x in zip(*places, strict=True))

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    batch = AttentionBatch(
        slots=(blocks[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,),
        tables=(blocks,),
        decode_rows=torch.arange(num_decodes, device=DEVICE),
        decode_lengths=torch.tensor(shape.decode_lengths, dtype=torch.int64, device=DEVICE),
        max_decode_length=max(shape.decode_lengths, default=0),
        num_chunk_tokens=sum(span.count for span in spans),
        chunk_rows=ints([num_decodes + i for i in range(len(spans))]),
        chunk_offsets=ints([span.offset for span in spans]),
        chunk_starts=ints([span.start for span in spans]),
        chunk_ends=ints([span.length for span in spans]),
        chunks=tuple(spans),
    )
    return batch, len(ends) * max_blocks * BLOCK_SIZE
