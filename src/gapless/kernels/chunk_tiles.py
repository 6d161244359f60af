"""Chunks cut into tiles of tokens, as a table on the device, so that the host need not know the chunks.

The first record of the table has the number of tiles. The others, `SIZE` numbers each, have a tile's row, its first
token in the batch, the position of that token in the row, and the row's length. Tiles with many keys come first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SIZE = tl.constexpr(4)
CHUNKS_AT_A_TIME, TILES_AT_A_TIME = 128, 16


@triton.jit
def _num_tiles(starts, ends, chunk, num_chunks, TOKENS: tl.constexpr):
    """Where these chunks start, and in how many tiles they are cut: none behind the last chunk."""
    is_chunk = chunk < num_chunks
    start = tl.load(starts + chunk, mask=is_chunk, other=0).to(tl.int32)
    end = tl.load(ends + chunk, mask=is_chunk, other=0).to(tl.int32)
    return start, tl.cdiv(end - start, TOKENS)


@triton.jit(
    do_not_specialize=["num_chunks"],
    do_not_specialize_on_alignment=["rows", "offsets", "starts", "ends"],  # views of a packed plan
)
def _cut(
    rows, offsets, starts, ends, tiles, num_chunks,
    TOKENS: tl.constexpr, SIZE: tl.constexpr, CHUNKS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The tiles of one chunk. A tile's place in the table is the number of tiles, of all chunks, that precede it."""
    chunk = tl.program_id(0)
    start, num_tiles = _num_tiles(starts, ends, chunk, num_chunks, TOKENS)
    row = tl.load(rows + chunk).to(tl.int32)
    offset = tl.load(offsets + chunk).to(tl.int32)
    end = tl.load(ends + chunk).to(tl.int32)
    for first in range(0, num_tiles, TILES):
        tile = first + tl.arange(0, TILES)
        position = start + tile * TOKENS
        rank = tl.zeros([TILES], tl.int32)
        for some in range(0, num_chunks, CHUNKS):
            other = some + tl.arange(0, CHUNKS)
            other_start, other_tiles = _num_tiles(starts, ends, other, num_chunks, TOKENS)
            behind = position[:, None] - other_start[None, :]
            no_later = tl.where(behind < 0, 0, behind // TOKENS + 1)
            later = other_tiles[None, :] - tl.minimum(no_later, other_tiles[None, :])
            ties = (
                (behind >= 0) & (behind % TOKENS == 0) & (no_later <= other_tiles[None, :]) & (other < chunk)[None, :]
            )
            rank += tl.sum(later + ties.to(tl.int32), axis=1)
        at = tiles + (1 + rank) * SIZE
        is_tile = tile < num_tiles
        tl.store(at, tl.zeros([TILES], tl.int32) + row, mask=is_tile)
        tl.store(at + 1, offset + tile * TOKENS, mask=is_tile)
        tl.store(at + 2, position, mask=is_tile)
        tl.store(at + 3, tl.zeros([TILES], tl.int32) + end, mask=is_tile)
    if chunk == 0:
        total = 0
        for some in range(0, num_chunks, CHUNKS):
            _, counts = _num_tiles(starts, ends, some + tl.arange(0, CHUNKS), num_chunks, TOKENS)
            total += tl.sum(counts)
        tl.store(tiles, total)


def cut(
    rows: torch.Tensor,
    offsets: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    num_tokens: int,
    tokens_a_tile: int,
) -> torch.Tensor:
    """The table [1 + max_tiles, SIZE] of chunks that have at most `num_tokens` tokens together. int32

    Made without PDL: kernels read it before they wait for the kernel before them.
    """
    num_chunks = len(rows)
    max_tiles = num_tokens // tokens_a_tile + num_chunks
    tiles = torch.empty(1 + max_tiles, SIZE.value, dtype=torch.int32, device=rows.device)
    _cut[(num_chunks,)](
        rows, offsets, starts, ends, tiles, num_chunks,
        TOKENS=tokens_a_tile, SIZE=SIZE.value, CHUNKS=CHUNKS_AT_A_TIME, TILES=TILES_AT_A_TIME, num_warps=4,
    )  # fmt: skip
    return tiles
