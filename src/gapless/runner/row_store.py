"""What the device remembers of each row from step to step: last token, length, block table, sampling state.

Sampled tokens are written here and read here by the next step, so that no step waits for the host to know them.
Touched on the compute stream only; `apply` brings in what the plan changed, `advance` moves the rows on.
"""

from __future__ import annotations

import torch

from gapless.core.limits import Limits
from gapless.core.params import MAX_STOP_IDS
from gapless.device.base import Buffer, Device
from gapless.runner.fill import Packed


class RowStore:
    """Tensors indexed by row. One more row than the scheduler has, for padding."""

    def __init__(self, device: Device, limits: Limits) -> None:
        rows = limits.num_rows + 1
        self._limits = limits
        self.last_token = self._make(device, "last_token", (rows,), torch.int64)
        self.length = self._make(device, "length", (rows,), torch.int64)
        self.blocks = self._make(device, "blocks", (rows, limits.max_blocks), torch.int64)
        self.floats = self._make(device, "floats", (rows, 3), torch.float32)  # temperature, top_p, min_p
        self.top_k = self._make(device, "top_k", (rows,), torch.int64)
        self.seed = self._make(device, "seed", (rows,), torch.int64)
        self.min_total = self._make(device, "min_total", (rows,), torch.int64)
        self.stop_ids = self._make(device, "stop_ids", (rows, MAX_STOP_IDS), torch.int64)
        self.blocks[-1] = limits.num_blocks  # padding has the scratch block for all its positions
        self.buffer = Buffer("rows", self.last_token, host=False)  # stands for all of them

    @staticmethod
    def _make(device: Device, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return device.buffer(f"rows.{name}", shape, dtype).tensor

    def apply(self, packed: Packed) -> None:
        """Write the rows' new owners and new blocks."""
        if len(packed.seats):
            self._seat(packed.seats)
        if len(packed.new_blocks):
            row, index, block = packed.new_blocks.long().unbind(1)
            self.blocks[row, index] = block

    def _seat(self, seats: torch.Tensor) -> None:
        rows, top_k, min_total, low, high = seats[:, :5].long().unbind(1)
        self.top_k[rows] = top_k
        self.min_total[rows] = min_total
        self.seed[rows] = (high << 32) | (low & 0xFFFFFFFF)
        self.floats[rows] = seats[:, 5:8].view(torch.float32)
        self.stop_ids[rows] = seats[:, 8:].long()

    def advance(self, packed: Packed, tokens: torch.Tensor) -> None:
        """Move lengths past this step's tokens and keep what was sampled; NO_SAMPLE must not reach the embedding."""
        self.length[packed.decode_rows.long()] += 1
        if len(packed.chunk_rows):
            self.length[packed.chunk_rows.long()] = packed.chunk_ends.long()
        self.last_token[packed.sample_rows.long()] = tokens.clamp(min=0)
