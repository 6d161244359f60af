"""Paged attention in plain torch: for CPUs without a native step, and the oracle of every other backend.

Gathers a row's blocks into one tensor. Query heads that share a KV head are adjacent, so k and v are never repeated.
Data that all layers share (gather indices, masks) is computed once a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from gapless.attention.base import Attend, AttentionBatch, Rotation, Span


@dataclass(frozen=True, slots=True)
class ChunkView:
    """The positions that one chunk gathers, and its mask."""

    span: Span
    index: torch.Tensor  # [length] int64: slots of the row's positions
    mask: torch.Tensor | None  # [count, length] bool; None when plain causal


class ReferenceAttention:
    """Attention over `pools`, one for each layer: [num_slots, 2 * num_kv_heads, head_dim], k heads before v heads.

    Any memory layout works. It is fastest if the slots of a head are adjacent.
    """

    def __init__(self, pools: list[torch.Tensor], block_size: int, num_heads: int, scale: float) -> None:
        self._pools = pools
        self._block_size = block_size
        self._num_heads = num_heads
        self._num_kv_heads = pools[0].shape[1] // 2
        self._scale = scale

    def begin(self, batch: AttentionBatch) -> Attend:
        tables = batch.blocks[batch.chunk_rows]
        views = [self._view(tables[i], span) for i, span in enumerate(batch.chunks)]
        blocks, unseen, mask = self._decode_view(batch)
        num_rotated = self._num_heads + self._num_kv_heads

        def attend(layer: int, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            pool = self._pools[layer]
            qk = rotation.apply(heads[:, :num_rotated])
            q, k = qk[:, : self._num_heads], qk[:, self._num_heads :]
            pool.index_copy_(0, batch.slots, torch.cat((k, heads[:, num_rotated:]), dim=1).to(pool.dtype))
            parts = [self._attend_chunk(pool, q, view) for view in views]
            if batch.num_decodes:
                parts.insert(0, self._attend_decodes(pool, q[: batch.num_decodes], blocks, unseen, mask))
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

    def _decode_view(self, batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Blocks to gather, the mask of positions past a row's end [num_decodes, length, 1], and the addition to the
        scores [num_kv_heads * num_decodes, 1, length].
        """
        size = self._block_size
        num_blocks = -(-batch.max_decode_length // size)
        lengths = batch.decode_lengths[:, None]
        first = torch.arange(num_blocks, device=lengths.device) * size
        last_block = len(self._pools[0]) // size - 1  # padding: positions past a row's end belong to no row
        blocks = torch.where(first < lengths, batch.blocks[batch.decode_rows, :num_blocks], last_block)
        seen = torch.arange(num_blocks * size, device=lengths.device) < lengths
        mask = torch.zeros(seen.shape, dtype=self._pools[0].dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        return blocks.view(-1), ~seen[:, :, None], mask.repeat(self._num_kv_heads, 1)[:, None]

    def _attend_decodes(
        self, pool: torch.Tensor, q: torch.Tensor, blocks: torch.Tensor, unseen: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Two batched products, one batch entry for each KV head of each row."""
        num_rows, head_dim = q.shape[0], q.shape[-1]
        num_kv_heads, length = self._num_kv_heads, mask.shape[-1]
        by_head = pool.transpose(0, 1)  # [2 * num_kv_heads, num_slots, head_dim]
        kv = by_head.view(2 * num_kv_heads, -1, self._block_size, head_dim).index_select(1, blocks)
        kv.view(2 * num_kv_heads, num_rows, length, head_dim).masked_fill_(unseen, 0)  # stale: NaN times 0 is NaN
        k, v = kv.view(2, num_kv_heads * num_rows, length, head_dim).unbind(0)
        grouped = q.view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1).to(pool.dtype)
        grouped = grouped.reshape(num_kv_heads * num_rows, -1, head_dim)
        scores = torch.baddbmm(mask, grouped, k.transpose(1, 2), alpha=self._scale)
        out = torch.bmm(scores.softmax(dim=-1), v)
        return out.view(num_kv_heads, num_rows, -1, head_dim).transpose(0, 1).reshape(num_rows, -1)

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
