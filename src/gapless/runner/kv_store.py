"""The memory of the KV cache: a pool of blocks for each place of a group of layers.

Knows sizes. Which block belongs to whom is the scheduler's affair.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gapless.device.base import Buffer, Device


class KVStore:
    """Memory of [(num_blocks + 1) * block_size, 2 * num_kv_heads, head_dim] for each place, k heads before v heads.

    `pools` has the memory of each layer. Layers of different groups share it and use different blocks of it. The last
    block is nobody's: rows of padding write there. With `heads_first` a head's slots lie together in memory.
    The native step uses the same memory, laid out its own way (native/attention.h).
    """

    def __init__(
        self,
        device: Device,
        *,
        places: Sequence[int],
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        heads_first: bool,
    ) -> None:
        """places: of each layer in its group."""
        self._block_size = block_size
        num_slots, num_heads = (num_blocks + 1) * block_size, 2 * num_kv_heads
        shape = (num_heads, num_slots) if heads_first else (num_slots, num_heads)
        self.buffer: Buffer = device.buffer("kv", (max(places) + 1, *shape, head_dim), dtype)
        memory = self.buffer.tensor.unbind(0)
        self.memory = [place.transpose(0, 1) for place in memory] if heads_first else list(memory)
        self.pools = [self.memory[place] for place in places]

    def copy_blocks(self, copies: torch.Tensor) -> None:
        """Copy whole blocks; copies [n, 2] are from and to. No block is both."""
        sources, targets = copies.long().unbind(1)
        for pool in self.memory:
            bits = pool.view(torch.uint8) if pool.element_size() == 1 else pool  # torch has few operations on FP8
            blocks = bits.view(-1, self._block_size, *pool.shape[1:])
            blocks[targets] = blocks[sources]


def block_bytes(num_places: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers of a group."""
    return num_places * block_size * 2 * num_kv_heads * head_dim * dtype.itemsize
