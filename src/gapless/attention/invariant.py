"""Batch-invariant paged attention: a token's bits do not depend on its batch, its chunk or its neighbours.

Chooses the kernels' sizes, and owns their scratch memory. Neither changes a bit: keys are cut at fixed positions
(kernels/invariant_attention), and only the number of programs that share the segments depends on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from gapless.attention.base import Attend, AttentionBatch, Rotation
from gapless.kernels.invariant_attention import attend_chunks, attend_rows, lay_out, num_segments, turn_and_store
from gapless.kernels.launch import pdl
from gapless.models.spec import INVARIANT_KERNELS, AttentionSpec, attention_features, lacking

HEADS_A_PROGRAM = 8  # of the rotation kernel
PROGRAMS_A_CORE = 4  # most, when segments are spread: all of them run at once
MAX_SPLITS = 64
MIN_GROUP = 16  # rows of a tile that the matrix units take
WARP_BYTES = 2048  # of queries, for each warp of a program that takes rows
CHUNK_TILE = 64  # tokens
TABLE_BLOCK = 64


class InvariantAttention:
    """Attention over `pools`, one for each layer: [num_slots, 2 * num_kv_heads, head_dim], k heads before v heads."""

    def __init__(
        self,
        pools: list[torch.Tensor],
        block_size: int,
        specs: Sequence[AttentionSpec],
        num_rows: int,
        num_cores: int,
        max_model_len: int,
    ) -> None:
        """specs: of each layer."""
        num_heads, scale = specs[0].num_heads, specs[0].scale
        assert scale > 0  # the largest score is found before the scale is applied
        self.pools = pools
        self._num_heads = num_heads
        self._num_kv_heads = pools[0].shape[1] // 2
        self._head_dim = pools[0].shape[2]
        self._group = num_heads // self._num_kv_heads
        self._scale = scale * 1.4426950408889634  # the kernels use powers of two
        self._num_cores = num_cores
        self._max_segments = num_segments(max_model_len)
        self._scratch = self._make_scratch(num_rows)
        self._block_g = max(MIN_GROUP, triton.next_power_of_2(self._group))
        block_d = max(16, triton.next_power_of_2(self._head_dim))
        self.num_warps = min(max(self._block_g * block_d * pools[0].element_size() // WARP_BYTES, 1), 4)
        self._shape: dict[str, Any] = {
            "NUM_KV": self._num_kv_heads,
            "HEAD_DIM": self._head_dim,
            "BLOCK_D": block_d,
            "BLOCK_SIZE": block_size,
            "PRECISION": "ieee" if pools[0].dtype == torch.float32 else "tf32",
        }

    @staticmethod
    def why_not(specs: Sequence[AttentionSpec]) -> str | None:
        """Why the kernels cannot attend as the specs say, or None. They take one scale for all layers."""
        missing = lacking(attention_features(specs), INVARIANT_KERNELS)
        return None if missing is None else f"the batch-invariant attention kernels have no {missing}"

    def _make_scratch(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States of segments, statistics of theirs, and counters of programs. Only the compute stream uses them."""
        device = self.pools[0].device
        spread = max((count for count in range(1, num_rows + 1) if self.num_splits(count) > 1), default=0)
        num_parts = spread * self._num_kv_heads * self._max_segments * self._group
        parts = torch.empty(num_parts * self._head_dim, dtype=torch.float32, device=device)
        stats = torch.empty(num_parts * 2, dtype=torch.float32, device=device)
        counters = torch.zeros(num_rows * self._num_kv_heads, dtype=torch.int32, device=device)
        return parts, stats, counters

    def num_splits(self, num_rows: int) -> int:
        """Programs that share each row's segments, so that every core has work a few times over."""
        programs, splits = num_rows * self._num_kv_heads, 1
        most = min(MAX_SPLITS, self._max_segments)
        while splits < most and programs * splits * 2 <= PROGRAMS_A_CORE * self._num_cores:
            splits *= 2
        return splits

    def begin(self, batch: AttentionBatch) -> Attend:
        tiles = self._lay_out(batch)

        def attend(layer: int, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            pool = self.pools[layer]
            out = torch.empty(len(heads), self._num_heads, self._head_dim, dtype=heads.dtype, device=heads.device)
            if batch.num_decodes:
                self._attend_rows(batch, pool, heads, rotation, out)
            if tiles is not None:
                q = self._store(batch, pool, heads, rotation)
                self._attend_chunks(batch, pool, q, out, tiles)
            return out.flatten(1)

        return attend

    def _lay_out(self, batch: AttentionBatch) -> torch.Tensor | None:
        """The tiles of all chunks, [num_tiles, 2] on the device; None: there are no chunks."""
        num_tokens = batch.num_chunk_tokens
        if num_tokens == 0:
            return None
        num_chunks = len(batch.chunk_rows)
        num_tiles = num_tokens // CHUNK_TILE + num_chunks
        tiles = torch.empty(num_tiles, 2, dtype=torch.int32, device=batch.slots[0].device)
        lay_out[(triton.cdiv(num_tiles, TABLE_BLOCK),)](
            batch.chunk_starts, batch.chunk_ends, tiles, num_chunks, num_tiles,
            BLOCK_M=CHUNK_TILE, BLOCK=TABLE_BLOCK, num_warps=4,
        )  # fmt: skip
        return tiles

    def _attend_rows(
        self, batch: AttentionBatch, pool: torch.Tensor, heads: torch.Tensor, rotation: Rotation, out: torch.Tensor
    ) -> None:
        splits = self.num_splits(batch.num_decodes)
        norm = rotation.norm_weight
        attend_rows[(batch.num_decodes, self._num_kv_heads, splits)](
            heads, rotation.cos_sin, heads if norm is None else norm, pool, batch.slots[0], batch.tables[0],
            batch.decode_rows, batch.decode_lengths, out, *self._scratch,
            rotation.eps, self._scale, batch.tables[0].stride(0),
            GROUP=self._group, BLOCK_G=self._block_g,
            GROUP_2=triton.next_power_of_2(self._group), NUM_SPLITS=splits, MAX_SEGMENTS=self._max_segments,
            HAS_NORM=norm is not None, num_warps=self.num_warps, num_stages=2, **self._shape, **pdl(),
        )  # fmt: skip

    def _store(
        self, batch: AttentionBatch, pool: torch.Tensor, heads: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        """Write keys and values of all tokens into the pool; return their queries.

        Decode rows have done so for themselves, and are written again with the same bits.
        """
        num_tokens, total, head_dim = heads.shape
        q = torch.empty(num_tokens, self._num_heads, head_dim, dtype=heads.dtype, device=heads.device)
        norm = rotation.norm_weight
        turn_and_store[(num_tokens, triton.cdiv(total, HEADS_A_PROGRAM))](
            heads, rotation.cos_sin, heads if norm is None else norm, pool, batch.slots[0], q, rotation.eps,
            NUM_HEADS=self._num_heads, NUM_KV=self._num_kv_heads, HEAD_DIM=head_dim, BLOCK_D=self._shape["BLOCK_D"],
            BLOCK_H=HEADS_A_PROGRAM, HAS_NORM=norm is not None, num_warps=2, **pdl(),
        )  # fmt: skip
        return q

    def _attend_chunks(
        self, batch: AttentionBatch, pool: torch.Tensor, q: torch.Tensor, out: torch.Tensor, tiles: torch.Tensor
    ) -> None:
        attend_chunks[(self._num_heads, len(tiles))](
            q, pool, batch.tables[0], tiles,
            batch.chunk_rows, batch.chunk_offsets, batch.chunk_starts, batch.chunk_ends,
            out, self._scale, batch.tables[0].stride(0),
            NUM_HEADS=self._num_heads, BLOCK_M=CHUNK_TILE, num_warps=4, num_stages=2, **self._shape,
        )  # fmt: skip
