"""Paged attention in plain torch: the CPU path, and the oracle of every other backend.

Gathers a row's blocks into one piece and calls scaled_dot_product_attention, grouped query heads side by side, so that
k and v are never repeated. What layers share (gather indices, masks) is made once a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from gapless.attention.base import Attend, AttentionBatch, Rotation, Span


@dataclass(frozen=True, slots=True)
class ChunkView:
    """What one chunk gathers, and what it may see of it."""

    span: Span
    index: torch.Tensor  # [length] int64: slots of the row's positions
    mask: torch.Tensor | None  # [count, length] bool; None when plain causal


class ReferenceAttention:
    """Attention over `pools`, one for each layer: [num_slots, 2 * num_kv_heads, head_dim], k heads before v heads."""

    def __init__(self, pools: list[torch.Tensor], block_size: int, num_heads: int, scale: float) -> None:
        self._pools = pools
        self._block_size = block_size
        self._num_heads = num_heads
        self._num_kv_heads = pools[0].shape[1] // 2
        self._scale = scale

    def begin(self, batch: AttentionBatch) -> Attend:
        tables = batch.blocks[batch.chunk_rows]
        views = [self._view(tables[i], span) for i, span in enumerate(batch.chunks)]
        blocks, mask = self._decode_view(batch)
        num_rotated = self._num_heads + self._num_kv_heads

        def attend(layer: int, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            pool = self._pools[layer]
            qk = rotation.apply(heads[:, :num_rotated])
            q, k = qk[:, : self._num_heads], qk[:, self._num_heads :]
            pool.index_copy_(0, batch.slots, torch.cat((k, heads[:, num_rotated:]), dim=1).to(pool.dtype))
            parts = [self._attend_chunk(pool, q, view) for view in views]
            if batch.num_decodes:
                parts.insert(0, self._attend_decodes(pool, q[: batch.num_decodes], blocks, mask))
            out = parts[0] if len(parts) == 1 else torch.cat(parts)
            return out.to(q.dtype)

        return attend

    def _view(self, table: torch.Tensor, span: Span) -> ChunkView:
        size, length = self._block_size, span.length
        num_blocks = -(-length // size)
        within = torch.arange(size, device=table.device)
        index = (table[:num_blocks, None] * size + within).view(-1)[:length]
        if span.start == 0:
            return ChunkView(span, index, None)
        seen = torch.arange(length, device=table.device)
        last = torch.arange(span.start, length, device=table.device)
        return ChunkView(span, index, seen[None, :] <= last[:, None])

    def _decode_view(self, batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
        num_blocks = -(-batch.max_decode_length // self._block_size)
        seen = torch.arange(num_blocks * self._block_size, device=batch.slots.device)
        mask = seen[None, :] < batch.decode_lengths[:, None]
        return batch.blocks[batch.decode_rows, :num_blocks].reshape(-1), mask[:, None, None, :]

    def _attend_decodes(
        self, pool: torch.Tensor, q: torch.Tensor, blocks: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        num_rows, head_dim = q.shape[0], q.shape[-1]
        kv = pool.view(-1, self._block_size, *pool.shape[1:]).index_select(0, blocks)
        k, v = kv.view(num_rows, -1, 2, self._num_kv_heads, head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        grouped = q.reshape(num_rows, self._num_kv_heads, -1, head_dim).to(pool.dtype)
        out = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=self._scale)
        return out.reshape(num_rows, -1)

    def _attend_chunk(self, pool: torch.Tensor, q: torch.Tensor, view: ChunkView) -> torch.Tensor:
        offset, count = view.span.offset, view.span.count
        head_dim = q.shape[-1]
        kv = pool.index_select(0, view.index).view(-1, 2, self._num_kv_heads, 1, head_dim)
        k, v = kv.permute(1, 2, 3, 0, 4).expand(-1, -1, self._num_heads // self._num_kv_heads, -1, -1).unbind(0)
        grouped = q[offset : offset + count].view(count, self._num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        causal = view.mask is None
        out = scaled_dot_product_attention(
            grouped.to(pool.dtype), k, v, attn_mask=view.mask, is_causal=causal, scale=self._scale
        )
        return out.permute(2, 0, 1, 3).reshape(count, -1)
