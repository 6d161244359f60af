"""A row of logits, read once and remembered as a few thousand figures, and the shortlist of its largest logits.

The survey cuts a row into tiles of 64 logits and keeps of each its largest logit and the sum of its weights. As many
programs as there are tiles read the row side by side. All later work on a row is done by one program: the tiles whose
largest logit reaches some limit hold every logit from that limit up, so it reads those tiles alone and lists the
logits in the order of the vocabulary. NaN counts as -inf everywhere. Nothing is written to the logits, no sum
depends on what runs beside it, and the number of rows is not part of any compiled variant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class ShortlistSizes:
    """How a row is cut. All are powers of two."""

    tile: int = 64  # logits that share a figure
    span: int = 64  # tiles that one program of the survey reads
    chunk: int = 32  # tiles that are read at a time for the shortlist
    first: int = 32  # tiles that the first shortlist reads, at least
    room: int = 1024  # logits on the shortlist at most
    block: int = 4096  # logits at a time when a whole row must be read again

    def num_tiles(self, vocab: int) -> int:
        return int(triton.cdiv(vocab, self.tile))

    def survey(self, vocab: int) -> dict[str, int]:
        """Constants of kernels that survey."""
        return {"VOCAB": vocab, "TILE": self.tile, "SPAN": self.span, "NUM_TILES": self.num_tiles(vocab)}

    def search(self, vocab: int) -> dict[str, int]:
        """Constants of kernels that make a shortlist."""
        sizes = {"TILE": self.tile, "CHUNK": self.chunk, "FIRST": self.first, "ROOM": self.room}
        return sizes | self._figures(vocab)

    def passes(self, vocab: int) -> dict[str, int]:
        """Constants of kernels that read whole rows again."""
        return {"BLOCK": self.block, **self._figures(vocab)}

    def _figures(self, vocab: int) -> dict[str, int]:
        num_tiles = self.num_tiles(vocab)
        return {"VOCAB": vocab, "NUM_TILES": num_tiles, "TILES": triton.next_power_of_2(num_tiles)}


SIZES = ShortlistSizes()


@dataclass(frozen=True, slots=True)
class Figures:
    """Memory of the kernels, for some rows."""

    maxima: torch.Tensor  # [n, num_tiles] float32, of each tile
    sums: torch.Tensor  # [n, num_tiles] float32, of exp((logit - maximum) / temperature)
    near: torch.Tensor  # [n, num_tiles] int32, numbers of the tiles that are read for the shortlist
    values: torch.Tensor  # [n, room] float32, the shortlist
    ids: torch.Tensor  # [n, room] int32, its tokens

    @classmethod
    def empty(cls, logits: torch.Tensor, sizes: ShortlistSizes) -> Figures:
        def made(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(len(logits), width, dtype=dtype, device=logits.device)

        tiles, floats, ints = sizes.num_tiles(logits.shape[1]), torch.float32, torch.int32
        return cls(
            made(tiles, floats),
            made(tiles, floats),
            made(tiles, ints),
            made(sizes.room, floats),
            made(sizes.room, ints),
        )

    def all(self) -> tuple[torch.Tensor, ...]:
        """In the order of the kernels' arguments."""
        return self.maxima, self.sums, self.near, self.values, self.ids


@triton.jit
def num_forbidden(place, min_total, stops, NUM_STOPS: tl.constexpr):
    """How many stop tokens a row has that must not come at this place yet; they stand before the empty ones."""
    num_stops = tl.sum((tl.load(stops + tl.arange(0, NUM_STOPS)) >= 0).to(tl.int32), axis=0)
    return tl.where(place + 1 < tl.load(min_total), num_stops, 0)


@triton.jit
def plain(logits):
    """A row whose logits are read as they are."""
    return logits, logits, tl.full([], 0, tl.int32)


@triton.jit
def fetch(base, column, VOCAB: tl.constexpr):
    """Logits of one row in float32, -inf beyond the vocabulary.

    base: the model's logits, those that kernels/adjust.py made of them, and 1 where these count, else 0.
    """
    x = tl.load(base[0] + column, mask=column < VOCAB - VOCAB * base[2], other=-float("inf")).to(tl.float32)
    y = tl.load(base[1] + column, mask=column < VOCAB * base[2], other=-float("inf")).to(tl.float32)
    return tl.where(base[2] == 0, x, y)


@triton.jit
def admit(x, column, stops, num_stops):
    """Logits, -inf for NaN and for the first `num_stops` of the stop tokens.

    As their number is not a constant, a row without forbidden tokens jumps over the loop.
    """
    x = tl.where(x == x, x, -float("inf"))
    for i in range(num_stops):
        x = tl.where(column == tl.load(stops + i), -float("inf"), x)
    return x


@triton.jit
def look(base, column, stops, num_stops, VOCAB: tl.constexpr):
    """The logits of these columns that are a row's to choose from, others as -inf."""
    return admit(fetch(base, column, VOCAB), column, stops, num_stops)


@triton.jit
def warmth_of(temperature):
    """The inverse of a temperature above 0; below 1e-30 it would change nothing but may not be a number."""
    return 1.0 / tl.maximum(temperature, 1e-30)


@triton.jit
def weigh(x, top, warmth, floor):
    """Unnormalized probabilities of logits from `floor` up, 0 for others."""
    return tl.where(x >= floor, tl.exp((x - top) * warmth), 0.0)


@triton.jit
def top_k_of(field, VOCAB: tl.constexpr):
    """How many of the likeliest tokens a row keeps; 0: top-k is not used."""
    top_k = tl.load(field)
    return tl.where(top_k < VOCAB, top_k, 0)


@triton.jit
def floor_of_min_p(top, temperature, min_p):
    """The smallest logit that min-p leaves standing; -inf where it is not used."""
    return top + temperature * tl.log(min_p)


@triton.jit
def survey_columns(TILE: tl.constexpr, SPAN: tl.constexpr):
    """The tiles of one program of the survey [SPAN], and their columns [SPAN, TILE]."""
    tile = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    return tile, tile[:, None] * TILE + tl.arange(0, TILE)[None, :]


@triton.jit
def sum_tiles(x, largest, warmth):
    """The sum of exp((logit - maximum) * warmth) of tiles [SPAN, TILE]; 0 where all are -inf."""
    shift = tl.where(largest > -float("inf"), largest, 0.0)
    return tl.sum(tl.exp((x - shift[:, None]) * warmth), axis=1)


@triton.jit
def key_of(x):
    """Whole numbers in the order of float32 numbers."""
    bits = x.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 == 1, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def float_of(key):
    """The number that has this key."""
    bits = key ^ tl.where(key >> 31 == 1, 0x80000000, 0xFFFFFFFF).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def limit_for(maxima, top, least, mass, wanted):
    """The limit that at least `least` tiles reach, whose mass is at least `wanted`, and not many more.

    That is not more than twice as many as it takes, unless they tie; -inf where there are not enough tiles above it.
    """
    is_finite = maxima > -float("inf")
    count = tl.sum(is_finite.to(tl.int32), axis=0)
    low = key_of(tl.min(tl.where(is_finite, maxima, float("inf")), axis=0))
    low = tl.where(count < least, key_of(tl.full([], -float("inf"), tl.float32)), low)
    count = tl.where(count < least, 0, count)  # nothing to look for
    high = key_of(top) + 1
    while (count > 2 * least) & (high - low > 1):
        middle = low + (high - low) // 2
        is_reached = maxima >= float_of(middle)
        reached = tl.sum(is_reached.to(tl.int32), axis=0)
        is_low = reached >= least
        if wanted > 0:
            is_low = is_low & (tl.sum(tl.where(is_reached, mass, 0.0), axis=0) >= wanted)
        low = tl.where(is_low, middle, low)
        high = tl.where(is_low, high, middle)
        count = tl.where(is_low, reached, count)
        least = tl.where(is_low, least, tl.maximum(least, reached))
    return float_of(low)


@triton.jit
def list_from(
    limit, base, maxima, near, values, ids, stops, num_stops,
    VOCAB: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    """List the logits from `limit` up, by their place in the vocabulary; return how many, or some number beyond ROOM.

    -inf is never listed. Threads see each other's part of the list when this returns.
    """
    is_near = (maxima >= limit) & (maxima > -float("inf"))
    tl.store(near + tl.cumsum(is_near.to(tl.int32), axis=0) - 1, tl.arange(0, TILES), mask=is_near)
    num_near = tl.sum(is_near.to(tl.int32), axis=0)
    tl.debug_barrier()
    count = tl.where(num_near > ROOM, num_near, 0)
    start = num_near * 0
    while (start < num_near) & (count <= ROOM):
        slot = start + tl.arange(0, CHUNK)
        tile = tl.load(near + slot, mask=slot < num_near, other=NUM_TILES)
        column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        x = look(base, column, stops, num_stops, VOCAB)
        is_listed = (x >= limit) & (x > -float("inf"))
        listed = is_listed.to(tl.int32)
        in_tile = tl.sum(listed, axis=1)
        place = (count + tl.cumsum(in_tile, axis=0) - in_tile)[:, None] + tl.cumsum(listed, axis=1) - 1
        fits = is_listed & (place < ROOM)
        tl.store(values + place, x, mask=fits)
        tl.store(ids + place, column, mask=fits)
        count += tl.sum(in_tile, axis=0)
        start += CHUNK
    tl.debug_barrier()
    return count


@triton.jit
def load_list(values, ids, count, ROOM: tl.constexpr):
    """The shortlist, -inf beyond its end."""
    slot = tl.arange(0, ROOM)
    here = slot < count
    return tl.load(values + slot, mask=here, other=-float("inf")), tl.load(ids + slot, mask=here, other=0)
