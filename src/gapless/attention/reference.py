"""Paged attention in plain torch: for CPUs without a native step, and the oracle of every other backend.

Does all that a spec can ask for. Gathers a row's blocks into one piece; query heads that share a KV head stand side by
side, so that k and v are never repeated. What layers share (gather indices, masks) is made once a step and window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from gapless.attention.base import FP8, MAX_FP8, Attend, AttentionBatch, Rotation, Span
from gapless.models.spec import AttentionSpec, KVUnits


@dataclass(frozen=True, slots=True)
class ChunkView:
    """The positions that one chunk gathers, from the first that any of its tokens sees on, and its mask."""

    span: Span
    index: torch.Tensor  # [num_seen] int64: slots of the positions
    mask: torch.Tensor | None  # [count, num_seen] bool; None when plain causal


@dataclass(frozen=True, slots=True)
class DecodeView:
    """The blocks that the decode rows gather, and the positions that they may see."""

    blocks: torch.Tensor  # [num_decodes * num_blocks]
    unseen: torch.Tensor  # [num_decodes, length, 1] bool: past a row's end, or before its window
    mask: torch.Tensor  # [num_kv_heads * num_decodes, 1, length]: added to the scores


class ReferenceAttention:
    """Attention over `pools`, one for each layer: [num_slots, 2 * num_kv_heads, head_dim], k heads before v heads.

    Any memory layout works. It is fastest if the slots of a head are adjacent. Pools of FP8 are widened to float32.
    """

    def __init__(
        self,
        pools: list[torch.Tensor],
        block_size: int,
        specs: Sequence[AttentionSpec],
        groups: Sequence[int] | None = None,
        units: Sequence[KVUnits] | None = None,
    ) -> None:
        """groups: of each layer, which of the batch's tables it reads; None: there is one. units: of each layer."""
        self._pools = pools
        self._dtype = torch.float32 if pools[0].dtype == FP8 else pools[0].dtype  # of the arithmetic
        self._units = self._factors(units or [KVUnits()] * len(specs), specs[0].num_kv_heads)
        self._specs = specs
        self._views = [(group, spec.window) for group, spec in zip(groups or [0] * len(specs), specs, strict=True)]
        self._block_size = block_size
        self._num_heads = specs[0].num_heads
        self._num_kv_heads = specs[0].num_kv_heads

    @staticmethod
    def why_not(specs: Sequence[AttentionSpec]) -> str | None:
        """There is nothing that it cannot do."""
        return None

    def begin(self, batch: AttentionBatch) -> Attend:
        tables = [table[batch.chunk_rows] for table in batch.tables]
        kinds = list(dict.fromkeys(self._views))
        chunks = {(g, w): [self._view(tables[g][i], s, w) for i, s in enumerate(batch.chunks)] for g, w in kinds}
        decodes = {(g, w): self._decode_view(batch, batch.tables[g], w) for g, w in kinds}
        num_rotated = self._num_heads + self._num_kv_heads

        def attend(layer: int, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            spec, kind = self._specs[layer], self._views[layer]
            qk = rotation.apply(heads[:, :num_rotated])
            q, k = qk[:, : self._num_heads], qk[:, self._num_heads :]
            self._store(layer, batch.slots[kind[0]], torch.cat((k, heads[:, num_rotated:]), dim=1))
            parts = [self._attend_chunk(layer, q, spec, view, rotation.sinks) for view in chunks[kind]]
            if batch.num_decodes:
                view = decodes[kind]
                parts.insert(0, self._attend_decodes(layer, q[: batch.num_decodes], spec, view, rotation.sinks))
            out = parts[0] if len(parts) == 1 else torch.cat(parts)
            return out.to(q.dtype)

        return attend

    def _factors(self, units: Sequence[KVUnits], num_kv_heads: int) -> list[torch.Tensor]:
        """Of each layer, what every head of the cache is multiplied by: [2 * num_kv_heads, 1]."""
        device = self._pools[0].device
        return [
            torch.tensor([unit.k, unit.v], device=device).repeat_interleave(num_kv_heads)[:, None] for unit in units
        ]

    def _store(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Write keys and values [n, 2 * num_kv_heads, head_dim] to the slots."""
        pool = self._pools[layer]
        if pool.dtype == FP8:
            narrow = (kv.float() / self._units[layer]).clamp(-MAX_FP8, MAX_FP8).to(FP8)
            pool.view(torch.uint8).index_copy_(0, slots, narrow.view(torch.uint8))  # torch cannot copy FP8 so
        else:
            pool.index_copy_(0, slots, kv.to(pool.dtype))

    def _widened(self, layer: int, by_slot: torch.Tensor) -> torch.Tensor:
        """What was gathered from a pool, [num_slots, 2 * num_kv_heads, head_dim], in the type of the arithmetic."""
        return by_slot if by_slot.dtype != FP8 else by_slot.to(self._dtype) * self._units[layer]

    def _view(self, table: torch.Tensor, span: Span, window: int | None) -> ChunkView:
        size, length = self._block_size, span.length
        first = 0 if window is None else max(0, span.start + 1 - window)
        seen = torch.arange(first, length, device=table.device)
        index = table[seen // size] * size + seen % size
        if span.start == 0 and (window is None or window >= length):
            return ChunkView(span, index, None)
        last = torch.arange(span.start, length, device=table.device)[:, None]
        mask = seen <= last
        return ChunkView(span, index, mask if window is None else mask & (seen > last - window))

    def _decode_view(self, batch: AttentionBatch, table: torch.Tensor, window: int | None) -> DecodeView:
        size = self._block_size
        num_blocks = -(-batch.max_decode_length // size)
        lengths = batch.decode_lengths[:, None]
        first = torch.arange(num_blocks, device=lengths.device) * size
        last_block = len(self._pools[0]) // size - 1  # padding: positions past a row's end belong to no row
        blocks = torch.where(first < lengths, table[batch.decode_rows, :num_blocks], last_block)
        places = torch.arange(num_blocks * size, device=lengths.device)
        seen = places < lengths
        if window is not None:
            seen &= places >= lengths - window
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        return DecodeView(blocks.view(-1), ~seen[:, :, None], mask.repeat(self._num_kv_heads, 1)[:, None])

    def _attend_decodes(
        self, layer: int, q: torch.Tensor, spec: AttentionSpec, view: DecodeView, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Two batched products, one batch entry for each KV head of each row."""
        num_rows, head_dim = q.shape[0], q.shape[-1]
        num_kv_heads, length = self._num_kv_heads, view.mask.shape[-1]
        by_head = self._pools[layer].transpose(0, 1)  # [2 * num_kv_heads, num_slots, head_dim]
        kv = by_head.view(2 * num_kv_heads, -1, self._block_size, head_dim).index_select(1, view.blocks)
        kv = self._widened(layer, kv.flatten(1, 2).transpose(0, 1)).transpose(0, 1)
        kv.view(2 * num_kv_heads, num_rows, length, head_dim).masked_fill_(view.unseen, 0)  # stale: NaN times 0 is NaN
        k, v = kv.view(2, num_kv_heads * num_rows, length, head_dim).unbind(0)
        grouped = q.view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1).to(self._dtype)
        grouped = grouped.reshape(num_kv_heads * num_rows, -1, head_dim)
        if is_plain(spec):
            weights = torch.baddbmm(view.mask, grouped, k.transpose(1, 2), alpha=spec.scale).softmax(dim=-1)
        else:
            by_group = None if sinks is None else sinks.view(num_kv_heads, -1, 1).repeat_interleave(num_rows, 0)
            weights = softmax(grouped @ k.transpose(1, 2), spec, view.mask, by_group)
        out = torch.bmm(weights, v)
        return out.view(num_kv_heads, num_rows, -1, head_dim).transpose(0, 1).reshape(num_rows, -1)

    def _attend_chunk(
        self, layer: int, q: torch.Tensor, spec: AttentionSpec, view: ChunkView, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        offset, count = view.span.offset, view.span.count
        head_dim = q.shape[-1]
        seen_kv = self._widened(layer, self._pools[layer].index_select(0, view.index))
        kv = seen_kv.view(-1, 2, self._num_kv_heads, 1, head_dim)
        k, v = kv.permute(1, 2, 3, 0, 4).expand(-1, -1, self._num_heads // self._num_kv_heads, -1, -1).unbind(0)
        grouped = q[offset : offset + count].view(count, self._num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        grouped = grouped.to(self._dtype)
        if is_plain(spec):
            causal = view.mask is None
            out = scaled_dot_product_attention(grouped, k, v, view.mask, is_causal=causal, scale=spec.scale)
        else:
            seen = torch.ones(count, count, device=q.device).tril().bool() if view.mask is None else view.mask
            mask = torch.zeros(seen.shape, dtype=self._dtype, device=q.device).masked_fill_(~seen, -torch.inf)
            by_group = None if sinks is None else sinks.view(self._num_kv_heads, -1, 1, 1)
            out = softmax(grouped @ k.transpose(2, 3), spec, mask, by_group) @ v
        return out.permute(2, 0, 1, 3).reshape(count, -1)


def is_plain(spec: AttentionSpec) -> bool:
    """Whether scores go into the softmax as they are."""
    return spec.soft_cap is None and not spec.sinks


def softmax(scores: torch.Tensor, spec: AttentionSpec, mask: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weights of unscaled scores [..., length]. The mask is added; sinks [..., 1] take a share that goes nowhere."""
    scores = scores * spec.scale
    if spec.soft_cap is not None:
        scores = (scores / spec.soft_cap).tanh() * spec.soft_cap
    scores = scores + mask
    if sinks is None:
        return scores.softmax(dim=-1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
