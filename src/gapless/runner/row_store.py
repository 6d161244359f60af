"""The device's state of each row from step to step: last token, length, block tables, its owner's seat,
the counts of its tokens, its biases and its mask.

Sampled tokens are written here and read here by the next step, so that no step waits for the host to know them.
Touched on the compute stream only; `apply` brings in what the plan changed, `advance` moves the rows on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gapless.core.baggage import MOST
from gapless.core.guide import mask_words
from gapless.core.limits import Limits
from gapless.core.params import MAX_BIASES
from gapless.core.row_fields import COUNTED, FIELDS, SEAT, SEAT_WORDS, RowField
from gapless.device.base import Buffer, Device
from gapless.runner.fill import Packed
from gapless.runner.steering import Steering


@dataclass(frozen=True, slots=True)
class RowState:
    """What processors read of all rows."""

    seats: torch.Tensor  # [num_rows, SEAT_WORDS] int32
    masks: torch.Tensor  # [num_rows, mask_words(vocab)] int32, tokens that may come next; of rows with a guide
    counts: torch.Tensor  # [num_rows, vocab] int16, of rows with penalties: see core/baggage
    biases: torch.Tensor  # [num_rows, MAX_BIASES, 2] int32: token, bits of a float32


class RowStore:
    """Tensors indexed by row. One more row than the scheduler has, for padding."""

    def __init__(self, device: Device, limits: Limits, vocab_size: int) -> None:
        rows = limits.num_rows + 1
        self.last_token = self._make(device, "last_token", (rows,), torch.int64)
        self.length = self._make(device, "length", (rows,), torch.int64)
        self.blocks = self._make(device, "blocks", (limits.num_groups, rows, limits.max_blocks), torch.int64)
        self.tables = self.blocks.unbind(0)  # of each group of layers
        self.seats = self._make(device, "seats", (rows, SEAT_WORDS), torch.int32)
        self.masks = self._make(device, "masks", (rows, mask_words(vocab_size)), torch.int32)
        self.counts = self._make(device, "counts", (rows, vocab_size), torch.int16)
        self.biases = self._make(device, "biases", (rows, MAX_BIASES, 2), torch.int32)
        self.state = RowState(self.seats, self.masks, self.counts, self.biases)
        self.blocks[:, -1] = limits.num_blocks  # padding has the scratch block for all its positions
        self.buffer = Buffer("rows", self.last_token, host=False)  # stands for all of them

    @staticmethod
    def _make(device: Device, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return device.buffer(f"rows.{name}", shape, dtype).tensor

    def apply(self, packed: Packed) -> None:
        """Write the rows' new owners and new blocks."""
        if len(packed.seat_rows):
            self.seats[packed.seat_rows.long()] = packed.seats
        if len(packed.new_blocks):
            row, index, *blocks = packed.new_blocks.long().unbind(1)
            for table, block in zip(self.tables, blocks, strict=True):
                table[row, index] = block
        self.take_in(packed.count_rows, packed.counts, packed.biases)

    def take_masks(self, new: Steering) -> None:
        """Write new masks."""
        if len(new.rows):
            self.masks.index_copy_(0, new.rows, new.masks)

    def take_in(self, count_rows: torch.Tensor, counts: torch.Tensor, biases: torch.Tensor) -> None:
        """Write what new owners bring beside their seats (core/baggage)."""
        if len(count_rows):
            self.counts[count_rows.long()] = 0
            row, token, count = counts.long().unbind(1)
            self.counts[row, token] = count.to(torch.int16)
        if len(biases):
            row, index = biases[:, :2].long().unbind(1)
            self.biases[row, index] = biases[:, 2:]

    def advance(self, packed: Packed, tokens: torch.Tensor, needs: int) -> None:
        """Move lengths past this step's tokens and keep what was sampled; NO_SAMPLE must not reach the embedding."""
        self.length[packed.decode_rows.long()] += 1
        if len(packed.chunk_rows):
            self.length[packed.chunk_rows.long()] = packed.chunk_ends.long()
        self.keep(packed.sample_rows.long(), tokens, needs)

    def keep(self, rows: torch.Tensor, tokens: torch.Tensor, needs: int) -> None:
        """Tokens [n] sampled for these rows [n] int64: the next to be fed, and counted where that is needed."""
        known = tokens.long().clamp(min=0)
        self.last_token[rows] = known
        if needs & COUNTED:
            count = self.counts[rows, known]
            is_new = (tokens >= 0) & ((count & MOST) < MOST)
            self.counts[rows, known] = count + is_new.to(torch.int16)


def seat_columns(seats: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each field of seats [num_rows, SEAT_WORDS] as a view: [num_rows], or [num_rows, width]."""
    return {field.name: _column(seats, field) for field in FIELDS}


def _column(seats: torch.Tensor, field: RowField) -> torch.Tensor:
    dtype, offset = SEAT.fields[field.name][:2]  # type: ignore[index]
    first = offset // 4
    words = seats[:, first : first + dtype.itemsize // 4]
    column = words.view(getattr(torch, dtype.base.name))
    return column if field.width > 1 else column.squeeze(1)
