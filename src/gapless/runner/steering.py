"""What the second half of a step is given besides the logits: new masks of its rows, and calls of logits processors.

The masks are packed into one array: the rows, then the masks. One array is one copy, and only masks that are new are in
it. The host fills it while the model runs; the device reads it at the head of the step's second half.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gapless.core.request import IntArray, LongArray
from gapless.runner.calls import Call


@dataclass(frozen=True, slots=True)
class Steering:
    """New masks, on the device, and calls to make."""

    rows: torch.Tensor  # [num_masks] int64
    masks: torch.Tensor  # [num_masks, mask_words] int32
    calls: tuple[Call, ...] = ()


def mask_capacity(num_rows: int, mask_words: int) -> int:
    """Numbers of int32 that a mask for every row takes."""
    return num_rows * (2 + mask_words)


def host_views(packed: IntArray, num_rows: int) -> tuple[LongArray, IntArray]:
    """Where the host writes: rows [num_rows], masks [num_rows, mask_words]."""
    rows, masks = packed[: 2 * num_rows], packed[2 * num_rows :]
    return rows.view(np.int64), masks.reshape(num_rows, -1)


def packed_size(count: int, num_rows: int, mask_words: int) -> int:
    """Numbers to copy for so many masks."""
    return 2 * num_rows + count * mask_words if count else 0


def device_views(packed: torch.Tensor, num_rows: int, count: int, calls: tuple[Call, ...] = ()) -> Steering:
    """The first masks, as the device reads them."""
    rows, masks = packed[: 2 * num_rows], packed[2 * num_rows :]
    return Steering(rows.view(torch.int64)[:count], masks.view(num_rows, -1)[:count], calls)
