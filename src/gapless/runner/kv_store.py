"""The memory of the KV cache: one pool of blocks for each layer.

Knows sizes. Which block belongs to whom is the scheduler's affair.
"""

from __future__ import annotations

import torch

from gapless.device.base import Buffer, Device


class KVStore:
    """Pools of [(num_blocks + 1) * block_size, 2 * num_kv_heads, head_dim], k heads before v heads.

    The last block is nobody's: rows of padding write there. With `heads_first` a head's slots lie together in memory.
    The native step uses the same memory, laid out its own way (native/attention.h).
    """

    def __init__(
        self,
        device: Device,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        heads_first: bool,
    ) -> None:
        self._block_size = block_size
        num_slots, num_heads = (num_blocks + 1) * block_size, 2 * num_kv_heads
        shape = (num_heads, num_slots) if heads_first else (num_slots, num_heads)
        self.buffer: Buffer = device.buffer("kv", (num_layers, *shape, head_dim), dtype)
        layers = self.buffer.tensor.unbind(0)
        self.pools = [layer.transpose(0, 1) for layer in layers] if heads_first else list(layers)

    def copy_blocks(self, copies: torch.Tensor) -> None:
        """Copy whole blocks; copies [n, 2] are from and to. No block is both."""
        sources, targets = copies.long().unbind(1)
        for pool in self.pools:
            blocks = pool.view(-1, self._block_size, *pool.shape[1:])
            blocks[targets] = blocks[sources]


def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers."""
    return num_layers * block_size * 2 * num_kv_heads * head_dim * dtype.itemsize
