"""Paged attention for NVIDIA GPUs by our own kernels: which ones are launched for a batch, and in what sizes.

Owns their scratch memory. Also runs under Triton's interpreter, where tests compare it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton

from gapless.attention.base import Attend, AttentionBatch, Rotation
from gapless.kernels.attention import decode, prefill, rotate_and_store
from gapless.kernels.launch import HOPPER, generation, pdl
from gapless.models.spec import AttentionSpec, Feature, attention_features, lacking

HEADS_A_PROGRAM = 8  # of the rotation kernel
MANY_SPLITS, MAX_SPLITS = 8, 16
PROGRAMS_A_CORE = 8  # most, when keys are split; half as many where there are more than MANY_SPLITS
PROGRAMS_AHEAD = 2  # most per core for which they prefetch their first keys before they wait
WARP_BYTES = 4096  # of queries, for each warp of a decode program
MIN_GROUP = 16  # rows of a tile that the matrix units take
STREAM_DTYPES = (torch.bfloat16, torch.float16)
STREAM_HEAD_DIMS = (64, 128)
CORES_A_HEAD = 4  # for each KV head of each row: from here on rows are few
PREFILL_BLOCK_M = 64

# a part of a layer's work: (pool, heads, rotation, out [num_tokens, num_heads, head_dim]) -> out or what replaces it
Part = Callable[[torch.Tensor, torch.Tensor, Rotation, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of tokens, each over its own row. The first four are tensors [num_chunks] on the device."""

    rows: torch.Tensor
    offsets: torch.Tensor  # of its first token in the batch
    starts: torch.Tensor  # position of that token in the row
    ends: torch.Tensor  # the row's length after the step
    first: int  # token of the batch
    count: int  # of tokens, in all chunks
    longest: int  # most tokens of a chunk

    @classmethod
    def of(cls, batch: AttentionBatch) -> Chunks:
        """The chunks of a batch."""
        counts = [span.count for span in batch.chunks]
        return cls(
            batch.chunk_rows,
            batch.chunk_offsets,
            batch.chunk_starts,
            batch.chunk_ends,
            first=batch.num_decodes,
            count=sum(counts),
            longest=max(counts),
        )


@dataclass(frozen=True, slots=True)
class StreamSizes:
    """How the kernel that streams the keys of decode rows is launched."""

    num_warps: int
    num_stages: int  # of its ring, a block for each warp in each
    programs_a_core: int
    min_share: int  # blocks of a program at least, where there are as many


FEW_ROWS = StreamSizes(num_warps=4, num_stages=4, programs_a_core=1, min_share=6)  # fewer parts of each to join
MANY_ROWS = StreamSizes(num_warps=2, num_stages=4, programs_a_core=2, min_share=6)


class TritonAttention:
    """Attention over `pools`, one for each layer: [num_slots, 2 * num_kv_heads, head_dim], k heads before v heads."""

    def __init__(
        self,
        pools: list[torch.Tensor],
        block_size: int,
        num_heads: int,
        scale: float,
        num_rows: int,
        num_cores: int,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """batch_invariant: decode rows are chunks of one token, so that a token's sums never depend on its batch."""
        self._batch_invariant = batch_invariant
        self.pools = pools
        self._block_size = block_size
        self._num_heads = num_heads
        self._num_kv_heads = pools[0].shape[1] // 2
        self._head_dim = pools[0].shape[2]
        self._group = num_heads // self._num_kv_heads
        self._block_g = max(MIN_GROUP, triton.next_power_of_2(self._group))
        self._block_d = max(16, triton.next_power_of_2(self._head_dim))
        self.num_warps = min(max(self._block_g * self._block_d * pools[0].element_size() // WARP_BYTES, 1), 4)
        self.scale = scale
        self._scale = scale * 1.4426950408889634  # the kernels use powers of two
        self._num_cores = num_cores
        self._precision = "ieee" if pools[0].dtype == torch.float32 else "tf32"
        self._scratch = self._make_scratch(num_rows)
        self._streams = self._can_stream()

    @staticmethod
    def why_not(specs: Sequence[AttentionSpec]) -> str | None:
        """Why the kernels cannot attend as the specs say, or None. They take one scale for all layers."""
        missing = lacking(attention_features(specs), {Feature.SCALE})
        return None if missing is None else f"the attention kernels have no {missing}"

    def _make_scratch(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Partial results, their statistics, and counters of finished parts. Only the compute stream uses them."""
        device = self.pools[0].device
        num_parts = PROGRAMS_A_CORE * self._num_cores
        parts = torch.empty(num_parts * self._group * self._head_dim, dtype=torch.float32, device=device)
        stats = torch.empty(num_parts * self._group * 2, dtype=torch.float32, device=device)
        counters = torch.zeros(num_rows * self._num_kv_heads, dtype=torch.int32, device=device)
        return parts, stats, counters

    def _can_stream(self) -> bool:
        """Whether this GPU and these heads are what the kernel in Gluon is for."""
        pool = self.pools[0]
        if generation() != HOPPER or pool.dtype not in STREAM_DTYPES or self._head_dim not in STREAM_HEAD_DIMS:
            return False
        try:
            from gapless.kernels import stream
        except (ImportError, AttributeError):  # Gluon is experimental: its names come and go
            return False
        return self._block_size == stream.BLOCK_SIZE and self._group <= stream.MAX_GROUP

    def stream_sizes(self, num_rows: int) -> StreamSizes | None:
        """How keys of so many decode rows are streamed; None: the kernel in Triton takes them."""
        if not self._streams:
            return None
        return FEW_ROWS if num_rows * self._num_kv_heads * CORES_A_HEAD <= self._num_cores else MANY_ROWS

    def num_splits(self, num_rows: int) -> int:
        """Parts into which each row's keys are split, so that every core has work a few times over."""
        programs = num_rows * self._num_kv_heads
        most = PROGRAMS_A_CORE * self._num_cores
        splits = 1
        while splits < MANY_SPLITS and programs * splits * 2 <= most:
            splits *= 2
        return MAX_SPLITS if programs * MAX_SPLITS <= most // 2 else splits

    def loads_ahead(self, num_rows: int) -> bool:
        """Whether programs are so few that each loads its first keys before it waits."""
        return num_rows * self._num_kv_heads * self.num_splits(num_rows) <= PROGRAMS_AHEAD * self._num_cores

    def begin(self, batch: AttentionBatch) -> Attend:
        return self.in_order((*self.decodes(batch), *self.chunks(batch)))

    def in_order(self, parts: Sequence[Part]) -> Attend:
        """The function that does a layer's parts in order."""

        def attend(layer: int, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            pool = self.pools[layer]
            out = torch.empty(len(heads), self._num_heads, self._head_dim, dtype=heads.dtype, device=heads.device)
            for part in parts:
                out = part(pool, heads, rotation, out)
            return out.flatten(1)

        return attend

    def decodes(self, batch: AttentionBatch) -> list[Part]:
        """The work for the decode rows; empty where there are none."""
        count = batch.num_decodes
        if count == 0:
            return []
        if not self._batch_invariant:
            return [partial(self._attend_decodes, batch)]
        ends = batch.decode_lengths
        offsets = torch.arange(count, device=ends.device)
        chunks = Chunks(batch.decode_rows, offsets, ends - 1, ends, first=0, count=count, longest=1)
        return [partial(self._attend_chunks, batch, chunks)]

    def chunks(self, batch: AttentionBatch) -> list[Part]:
        """The work for the chunks; empty where there are none."""
        return [partial(self._attend_chunks, batch, Chunks.of(batch))] if batch.chunks else []

    def _attend_decodes(
        self, batch: AttentionBatch, pool: torch.Tensor, heads: torch.Tensor, rotation: Rotation, out: torch.Tensor
    ) -> torch.Tensor:
        if sizes := self.stream_sizes(batch.num_decodes):
            self._stream(batch, pool, heads, rotation, out, sizes)
            return out
        splits = self.num_splits(batch.num_decodes)
        ahead = self.loads_ahead(batch.num_decodes)
        parts, stats, counters = self._scratch
        norm = rotation.norm_weight
        decode[(batch.num_decodes, self._num_kv_heads, splits)](
            heads, rotation.cos_sin, heads if norm is None else norm, pool, batch.slots, batch.blocks,
            batch.decode_rows, batch.decode_lengths, out, parts, stats, counters,
            rotation.eps, self._scale, batch.blocks.stride(0),
            NUM_KV=self._num_kv_heads, GROUP=self._group, BLOCK_G=self._block_g,
            GROUP_2=triton.next_power_of_2(self._group),
            BLOCK_SIZE=self._block_size, BLOCK_N=64 if ahead else 32, NUM_SPLITS=splits, AHEAD=ahead,
            HAS_NORM=norm is not None, num_warps=2 * self.num_warps if ahead else self.num_warps, num_stages=2,
            **self._shape(), **pdl(),
        )  # fmt: skip
        return out

    def _stream(
        self,
        batch: AttentionBatch,
        pool: torch.Tensor,
        heads: torch.Tensor,
        rotation: Rotation,
        out: torch.Tensor,
        sizes: StreamSizes,
    ) -> None:
        from gapless.kernels.stream import stream_decode  # on Hopper alone

        count = batch.num_decodes
        norm = rotation.norm_weight
        stream_decode[(sizes.programs_a_core * self._num_cores,)](
            heads, rotation.cos_sin, heads if norm is None else norm, pool, batch.slots, batch.blocks,
            batch.decode_rows, batch.decode_lengths, out, *self._scratch,
            rotation.eps, self._scale, batch.blocks.stride(0), count,
            NUM_KV=self._num_kv_heads, GROUP=self._group, GROUP_2=triton.next_power_of_2(self._group),
            HEAD_DIM=self._head_dim, LENGTHS=max(32, triton.next_power_of_2(count)), MIN_SHARE=sizes.min_share,
            NUM_STAGES=sizes.num_stages, HAS_NORM=norm is not None, num_warps=sizes.num_warps, launch_pdl=True,
        )  # fmt: skip

    def _attend_chunks(
        self,
        batch: AttentionBatch,
        chunks: Chunks,
        pool: torch.Tensor,
        heads: torch.Tensor,
        rotation: Rotation,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """The rotation kernel takes the chunks' tokens, which are adjacent."""
        first = chunks.first
        q = self.store(pool, heads, rotation, batch.slots, first, chunks.count)
        prefill[(triton.cdiv(chunks.longest, PREFILL_BLOCK_M), self._num_heads, len(chunks.rows))](
            q, pool, batch.blocks, chunks.rows, chunks.offsets, chunks.starts, chunks.ends, out,
            self._scale, batch.blocks.stride(0), first,
            NUM_HEADS=self._num_heads, NUM_KV=self._num_kv_heads,
            BLOCK_SIZE=self._block_size, BLOCK_M=PREFILL_BLOCK_M, BLOCK_N=64, num_warps=4, num_stages=2,
            **self._shape(),
        )  # fmt: skip
        return out

    def store(
        self, pool: torch.Tensor, heads: torch.Tensor, rotation: Rotation, slots: torch.Tensor, first: int, count: int
    ) -> torch.Tensor:
        """Write keys and values of `count` tokens, from the batch's `first` on, into the pool; return their queries."""
        total, head_dim = heads.shape[1:]
        q = torch.empty(count, self._num_heads, head_dim, dtype=heads.dtype, device=heads.device)
        norm = rotation.norm_weight
        rotate_and_store[(count, triton.cdiv(total, HEADS_A_PROGRAM))](
            heads[first:], rotation.cos_sin[first:], heads if norm is None else norm, pool, slots[first:], q,
            rotation.eps,
            NUM_HEADS=self._num_heads, NUM_KV=self._num_kv_heads, HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_H=HEADS_A_PROGRAM, HAS_NORM=norm is not None,
            num_warps=2,
        )  # fmt: skip
        return q

    def _shape(self) -> dict[str, Any]:
        return {
            "HEAD_DIM": self._head_dim,
            "BLOCK_D": self._block_d,
            "PRECISION": self._precision,
        }
