"""Chunks as a table of tiles, under the interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gapless.kernels.chunk_tiles import cut

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

CHUNKS = {  # (start, count) of each
    "one token": [(0, 1)],
    "exactly one tile": [(0, 16)],
    "odd lengths": [(0, 33), (5, 77), (200, 3)],
    "many tiles": [(7, 16 * 40 + 1)],
    "alike": [(32, 40)] * 5,
    "empty in between": [(0, 0), (0, 20), (9, 0), (3, 50), (0, 0)],
    "nothing": [(0, 0), (4, 0)],
    "more than a program looks at": [(i % 7, i % 35) for i in range(257)],
}


@pytest.mark.parametrize(("name", "slack"), [*((name, 0) for name in CHUNKS), ("nothing", 100), ("odd lengths", 100)])
def test_every_token_is_in_one_tile_and_tiles_with_many_keys_come_first(name: str, slack: int) -> None:
    size, first = 16, 3
    chunks = CHUNKS[name]
    offsets = [first + sum(count for _, count in chunks[:i]) for i in range(len(chunks))]
    expected = [
        [100 + i, offsets[i] + done, start + done, start + count]
        for i, (start, count) in enumerate(chunks)
        for done in range(0, count, size)
    ]
    num_tokens = sum(count for _, count in chunks)
    given = [
        [100 + i for i in range(len(chunks))],
        offsets,
        [start for start, _ in chunks],
        [start + count for start, count in chunks],
    ]
    tensors = [torch.tensor([0, *values], dtype=torch.int32, device=DEVICE)[1:] for values in given]  # not aligned
    table = cut(*tensors, num_tokens + slack, size)
    assert len(table) - 1 >= len(expected)
    assert table.dtype == torch.int32
    assert int(table[0, 0]) == len(expected)
    tiles = table[1 : 1 + len(expected)].tolist()
    assert tiles == sorted(expected, key=lambda tile: -tile[2])  # a stable sort: ties as the chunks come


def test_lengths_of_any_integer_type() -> None:
    """As decode rows have them."""
    rows, tokens, starts, ends = (torch.tensor([value, value + 1], device=DEVICE) for value in (4, 0, 8, 9))
    table = cut(rows, tokens, starts, ends, 2, 64)
    assert table[0, 0] == 2
    assert table[1:3].tolist() == [[5, 1, 9, 10], [4, 0, 8, 9]]
