"""The two ends of a captured mixed step, in Triton: a packed plan to model inputs, and tokens to rows.

How many decode rows, chunks, tokens and samples a step has is data, in a header before the packed plan; a graph fixes
only how many there are at most. What is left over belongs to a row of padding (the last one), which has a scratch
block of its own and never advances. Runs under Triton's interpreter too.

    header | decode_rows | chunk_rows | chunk_offsets | chunk_starts | chunk_ends | chunk_samples | chunk_tokens
    | new_blocks (row, index, block of each group of layers) | seat_rows | seats
    | count_rows | counts (row, token, count) | biases (row, index, token, bits) | score_places
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.core.row_fields import SEAT_WORDS

# numbers, of which the first eleven are: decode rows, chunks, tokens, new blocks, seats, samples, num_top, rows whose
# counts begin anew, counts, biases, and the numbers of a new block
HEADER = 12
CHUNK_WORDS = 5  # row, offset, start, end, and which sample it gives, or -1
NO_SCORE = -1
TILE = 64
CHUNKS_AT_A_TIME = 512  # that a tile of tokens is compared with: all of very many would be too large for Triton

_HEADER, _CHUNK_WORDS, _NO_SCORE = tl.constexpr(HEADER), tl.constexpr(CHUNK_WORDS), tl.constexpr(NO_SCORE)


@triton.jit
def find_baggage(packed, SEAT_WORDS: tl.constexpr):
    """Where the baggage of new owners begins, and how many rows, counts and biases it has."""
    num_chunks = tl.load(packed + 1)
    num_tokens = tl.load(packed + 2)
    at = packed + _HEADER + _CHUNK_WORDS * num_chunks + num_tokens
    at += tl.load(packed + 3) * tl.load(packed + 10)
    at += tl.load(packed + 4) * (SEAT_WORDS + 1)
    return at, tl.load(packed + 7), tl.load(packed + 8), tl.load(packed + 9)


@triton.jit
def count_token(counts, row, token, here, VOCAB: tl.constexpr):
    """One more of a token in the counts of its row; the sign bit says something else (core/baggage)."""
    count = tl.load(counts + row * VOCAB + token, mask=here, other=0)
    more = (count.to(tl.int32) & 32767) < 32767
    tl.store(counts + row * VOCAB + token, count + more.to(tl.int16), mask=here)


@triton.jit
def _take_in(
    packed, blocks, seats, group_stride, table_stride,
    GROUPS: tl.constexpr, SEAT_WORDS: tl.constexpr, SEAT_BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Some of the new entries of block tables, and one new owner's seat."""
    i = tl.program_id(0)
    num_chunks = tl.load(packed + 1)
    num_tokens = tl.load(packed + 2)
    num_blocks = tl.load(packed + 3)
    num_seats = tl.load(packed + 4)
    at = packed + _HEADER + _CHUNK_WORDS * num_chunks + num_tokens
    entry = i * TILE + tl.arange(0, TILE)
    here = entry < num_blocks
    words = at + (2 + GROUPS) * entry
    row = tl.load(words, mask=here, other=0).to(tl.int64)
    index = tl.load(words + 1, mask=here, other=0)
    for group in tl.static_range(GROUPS):
        block = tl.load(words + 2 + group, mask=here, other=0)
        tl.store(blocks + group * group_stride + row * table_stride + index, block.to(tl.int64), mask=here)
    at += (2 + GROUPS) * num_blocks
    if i < num_seats:
        word = tl.arange(0, SEAT_BLOCK)
        owned = tl.load(at + i).to(tl.int64)
        value = tl.load(at + num_seats + i * SEAT_WORDS + word, mask=word < SEAT_WORDS, other=0)
        tl.store(seats + owned * SEAT_WORDS + word, value, mask=word < SEAT_WORDS)


@triton.jit(do_not_specialize=["padding_row", "max_rows", "max_tokens"])  # they vary with the shape
def _begin(
    packed, last_token, length, blocks, ids, positions, slots,
    decode_rows, decode_lengths, chunk_rows, chunk_offsets, chunk_starts, chunk_ends,
    sample_tokens, sample_rows, sample_places, score_places, num_top, padding_row, group_stride, table_stride,
    max_rows, max_tokens,
    GROUPS: tl.constexpr, MAX_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SEAT_WORDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of the step's tokens, and as many of its decode rows, chunks and samples."""
    num_decodes = tl.load(packed)
    num_chunks = tl.load(packed + 1)
    num_tokens = tl.load(packed + 2)
    num_samples = tl.load(packed + 5)
    chunk_at = packed + _HEADER + num_decodes
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    padding = i * 0 + padding_row

    is_decode = i < num_decodes
    in_chunk = (i >= num_decodes) & (i < num_tokens)
    chunk = i * 0 - 1
    for first in range(0, MAX_CHUNKS, CHUNKS):
        every = first + tl.arange(0, CHUNKS)
        offset = tl.load(chunk_at + num_chunks + every, mask=every < num_chunks, other=2147483647)
        chunk += tl.sum((offset[None, :] <= i[:, None]).to(tl.int32), axis=1)
    own_offset = tl.load(chunk_at + num_chunks + chunk, mask=in_chunk, other=0)
    start = tl.load(chunk_at + 2 * num_chunks + chunk, mask=in_chunk, other=0)
    row = tl.load(chunk_at + chunk, mask=in_chunk, other=0)
    row = tl.where(in_chunk, row, padding)
    row = tl.where(is_decode, tl.load(packed + _HEADER + i, mask=is_decode, other=0), row).to(tl.int64)
    position = tl.where(in_chunk, start + i - own_offset, 0).to(tl.int64)
    position = tl.where(is_decode, tl.load(length + row, mask=is_decode, other=0), position)
    known = tl.load(packed + _HEADER + _CHUNK_WORDS * num_chunks + i, mask=in_chunk, other=0).to(tl.int64)
    kept = tl.load(last_token + row, mask=is_decode, other=0)
    here = i < max_tokens
    for group in tl.static_range(GROUPS):
        entry = blocks + group * group_stride + row * table_stride + position // BLOCK_SIZE
        block = tl.load(entry, mask=here, other=0)
        tl.store(slots + group * max_tokens + i, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=here)
    tl.store(ids + i, tl.where(is_decode, kept, known), mask=here)
    tl.store(positions + i, position, mask=here)

    in_rows = i < max_rows
    decode_row = tl.where(is_decode, row, padding.to(tl.int64))
    tl.store(decode_rows + i, decode_row, mask=in_rows)
    decode_length = tl.where(is_decode, position + 1, 0)
    tl.store(decode_lengths + i, decode_length, mask=in_rows)
    no_chunk = in_rows & (is_decode | (i >= num_samples))  # samples of chunks lie between these
    tl.store(sample_tokens + i, tl.where(is_decode, i, 0).to(tl.int64), mask=no_chunk)
    tl.store(sample_rows + i, decode_row, mask=no_chunk)
    tl.store(sample_places + i, decode_length, mask=no_chunk)

    is_chunk = i < num_chunks
    c_row = tl.load(chunk_at + i, mask=is_chunk, other=0)
    c_offset = tl.load(chunk_at + num_chunks + i, mask=is_chunk, other=0)
    c_start = tl.load(chunk_at + 2 * num_chunks + i, mask=is_chunk, other=0)
    c_end = tl.load(chunk_at + 3 * num_chunks + i, mask=is_chunk, other=0)
    sample = tl.load(chunk_at + 4 * num_chunks + i, mask=is_chunk, other=-1)
    tl.store(chunk_rows + i, tl.where(is_chunk, c_row, padding), mask=in_rows)
    tl.store(chunk_offsets + i, tl.where(is_chunk, c_offset, num_tokens), mask=in_rows)
    tl.store(chunk_starts + i, c_start, mask=in_rows)
    tl.store(chunk_ends + i, c_end, mask=in_rows)
    samples = is_chunk & (sample >= 0)
    tl.store(sample_tokens + sample, (c_offset + c_end - c_start - 1).to(tl.int64), mask=samples)
    tl.store(sample_rows + sample, c_row.to(tl.int64), mask=samples)
    tl.store(sample_places + sample, c_end.to(tl.int64), mask=samples)

    at, num_counted, num_counts, num_biases = find_baggage(packed, SEAT_WORDS)
    at += num_counted + 3 * num_counts + 4 * num_biases
    tops = tl.load(packed + 6)  # below 0: no scores
    num_places = tl.where(tops >= 0, num_samples, 0)
    place = tl.load(at + i, mask=in_rows & (i < num_places), other=_NO_SCORE)
    tl.store(score_places + i, place, mask=in_rows)
    tl.store(num_top + i, tl.maximum(tops + i * 0, 0), mask=i == 0)


@triton.jit(do_not_specialize=["padding_row", "max_rows"])
def _end(
    packed, tokens, sample_rows, sample_places, last_token, length, counts, out, padding_row, max_rows,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Some rows: keep the sampled token and move on, as do rows whose chunk gives no sample."""
    num_chunks = tl.load(packed + 1)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    here = i < max_rows
    row = tl.load(sample_rows + i, mask=here, other=0)
    place = tl.load(sample_places + i, mask=here, other=0)
    token = tl.load(tokens + i, mask=here, other=0)
    tl.store(out + i, token.to(tl.int32), mask=here)
    real = row < padding_row
    tl.store(last_token + row, tl.where(real & (token >= 0), token, 0), mask=here)  # NO_SAMPLE is below 0, and no token
    tl.store(length + row, tl.where(real, place, 0), mask=here)
    count_token(counts, row, token, here & real & (token >= 0), VOCAB)
    chunk_at = packed + _HEADER + tl.load(packed) + i
    silent = (i < num_chunks) & (tl.load(chunk_at + 4 * num_chunks, mask=i < num_chunks, other=0) < 0)
    end = tl.load(chunk_at + 3 * num_chunks, mask=silent, other=0).to(tl.int64)
    tl.store(length + tl.load(chunk_at, mask=silent, other=0).to(tl.int64), end, mask=silent)


class MixedInputs:
    """The inputs of model, attention and sampler for steps of at most so many rows and tokens. `begin` writes them.

    `slots` has a row for each group of layers.
    """

    def __init__(self, num_rows: int, num_tokens: int, num_groups: int, device: torch.device) -> None:
        def make(count: int, dtype: torch.dtype, size: int) -> tuple[torch.Tensor, ...]:
            return tuple(torch.zeros(size, dtype=dtype, device=device) for _ in range(count))

        self.num_rows, self.num_tokens = num_rows, num_tokens
        self.ids, self.positions = make(2, torch.int64, num_tokens)
        self.slots = torch.zeros(num_groups, num_tokens, dtype=torch.int64, device=device)
        self.decode_rows, self.decode_lengths = make(2, torch.int64, num_rows)
        self.chunk_rows, self.chunk_offsets, self.chunk_starts, self.chunk_ends = make(4, torch.int32, num_rows)
        self.sample_tokens, self.sample_rows, self.sample_places = make(3, torch.int64, num_rows)
        (self.score_places,) = make(1, torch.int32, num_rows)
        (self.num_top,) = make(1, torch.int32, 1)


def begin_mixed(
    packed: torch.Tensor,
    last_token: torch.Tensor,
    length: torch.Tensor,
    blocks: torch.Tensor,
    seats: torch.Tensor,
    block_size: int,
    max_new_blocks: int,
    inputs: MixedInputs,
) -> None:
    """Take in new owners and blocks, then write the step's inputs. `packed`: as the head of this file says."""
    strides, padding_row = blocks.stride()[:2], len(last_token) - 1
    seat_block = triton.next_power_of_2(SEAT_WORDS)
    _take_in[(max(inputs.num_rows, triton.cdiv(max_new_blocks, TILE)),)](
        packed, blocks, seats, *strides,
        GROUPS=len(blocks), SEAT_WORDS=SEAT_WORDS, SEAT_BLOCK=seat_block, TILE=TILE, num_warps=1,
    )  # fmt: skip
    some, max_chunks = inputs, triton.next_power_of_2(padding_row)
    _begin[(triton.cdiv(some.num_tokens, TILE),)](
        packed, last_token, length, blocks, some.ids, some.positions, some.slots,
        some.decode_rows, some.decode_lengths, some.chunk_rows, some.chunk_offsets, some.chunk_starts, some.chunk_ends,
        some.sample_tokens, some.sample_rows, some.sample_places, some.score_places, some.num_top,
        padding_row, *strides, some.num_rows, some.num_tokens,
        GROUPS=len(blocks), MAX_CHUNKS=max_chunks, CHUNKS=min(max_chunks, CHUNKS_AT_A_TIME),
        BLOCK_SIZE=block_size, SEAT_WORDS=SEAT_WORDS, TILE=TILE, num_warps=4,
    )  # fmt: skip


def end_mixed(
    packed: torch.Tensor,
    tokens: torch.Tensor,
    inputs: MixedInputs,
    last_token: torch.Tensor,
    length: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write `tokens` [num_rows] int64 to the rows and to `out` int32, count them, and move all rows of the step on."""
    _end[(triton.cdiv(inputs.num_rows, TILE),)](
        packed, tokens, inputs.sample_rows, inputs.sample_places, last_token, length, counts, out,
        len(last_token) - 1, inputs.num_rows, VOCAB=counts.shape[1], TILE=TILE, num_warps=2,
    )  # fmt: skip
