"""Paged attention for NVIDIA GPUs by our own kernels: which ones are launched for a batch, and in what sizes.

Owns their scratch memory. Also runs under Triton's interpreter, where tests compare it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import triton

from gapless.attention.base import FP8, Attend, AttentionBatch, Rotation
from gapless.kernels.attention import decode, rotate_and_store
from gapless.kernels.chunk_tiles import SIZE, cut
from gapless.kernels.launch import HOPPER, beside, generation, gluon_kernels, pdl
from gapless.kernels.prefill import prefill
from gapless.kernels.score_options import ScoreOptions
from gapless.models.spec import KERNELS, AttentionSpec, KVUnits, attention_features, lacking

if TYPE_CHECKING:
    from gapless.kernels.hopper_prefill import HopperPrefill

HEADS_A_TIME = 16  # of the rotation kernel
MANY_SPLITS, MAX_SPLITS = 8, 16
PROGRAMS_A_CORE = 8  # most, when keys are split; half as many where there are more than MANY_SPLITS
PROGRAMS_AHEAD = 2  # most per core for which they prefetch their first keys before they wait
WARP_BYTES = 4096  # of queries, for each warp of a decode program
MIN_GROUP = 16  # rows of a tile that the matrix units take
STREAM_DTYPES = (torch.bfloat16, torch.float16, FP8)
STREAM_HEAD_DIMS = (64, 128, 256)
STREAM_PROGRAMS = 16  # of the kernel in Triton for each core, at most: what comes beyond was not measured
LARGE = 128  # heads above have fewer stages and warps
CORES_A_HEAD = 4  # for each KV head of each row: from here on rows are few
LOG2_E = 1.4426950408889634  # kernels use powers of two
MAX_HEAD_DIM = 256  # tiles of larger heads do not fit
PREFILL_BLOCK_M = 64  # tokens of a tile

# a part of a layer's work: (layer, heads, rotation, out [num_tokens, num_heads, head_dim]) -> out or what replaces it
Part = Callable[[int, torch.Tensor, Rotation, torch.Tensor], torch.Tensor]


@cache
def hopper_prefill() -> type[HopperPrefill] | None:
    """The kernel for chunks on Hopper, if this Triton's Gluon is one that it knows."""
    found = gluon_kernels("hopper_prefill")
    return None if found is None else found.HopperPrefill


@dataclass(frozen=True, slots=True)
class StreamSizes:
    """How the kernel that streams the keys of decode rows is launched."""

    num_warps: int
    num_stages: int  # of its ring, a block for each warp in each
    programs_a_core: int
    min_share: int  # blocks of a program at least, where there are as many


FEW_ROWS = StreamSizes(num_warps=4, num_stages=4, programs_a_core=1, min_share=6)  # fewer parts of each to join
MANY_ROWS = StreamSizes(num_warps=2, num_stages=4, programs_a_core=2, min_share=6)
LARGE_HEADS = StreamSizes(num_warps=2, num_stages=4, programs_a_core=1, min_share=6)  # of 256: twice the memory
NARROW = StreamSizes(num_warps=4, num_stages=4, programs_a_core=2, min_share=6)  # FP8: half the memory, more to compute


class TritonAttention:
    """Attention over `pools`, one for each layer: [num_slots, 2 * num_kv_heads, head_dim], k heads before v heads."""

    def __init__(
        self,
        pools: list[torch.Tensor],
        block_size: int,
        specs: Sequence[AttentionSpec],
        num_rows: int,
        num_cores: int,
        groups: Sequence[int] | None = None,
        units: Sequence[KVUnits] | None = None,
    ) -> None:
        """specs and units: of each layer. groups: of each layer, which of the batch's tables it reads; None: one."""
        num_heads = specs[0].num_heads
        self.pools = pools
        self.specs = specs
        self._groups = groups or [0] * len(specs)
        units = units or [KVUnits()] * len(specs)
        self._options = [score_options(spec, unit) for spec, unit in zip(specs, units, strict=True)]
        self._block_size = block_size
        self._num_heads = num_heads
        self._num_kv_heads = pools[0].shape[1] // 2
        self._head_dim = pools[0].shape[2]
        self._group = num_heads // self._num_kv_heads
        self._block_g = max(MIN_GROUP, triton.next_power_of_2(self._group))
        self._block_d = max(16, triton.next_power_of_2(self._head_dim))
        query_bytes = self._block_g * self._block_d * (2 if pools[0].dtype == FP8 else pools[0].element_size())
        self.num_warps = min(max(query_bytes // WARP_BYTES, 1), 4)
        self._num_cores = num_cores
        self._precision = "ieee" if pools[0].dtype == torch.float32 else "tf32"
        self._scratch = self._make_scratch(num_rows)
        self._streams = self._can_stream()
        self._hopper = None
        windows = [options.window for options in self._options if options.window]
        if (kernel := hopper_prefill()) is not None and kernel.is_for(pools[0], block_size, windows):
            self._hopper = kernel(pools[0], block_size, num_heads, num_cores)
        self._none_before = torch.zeros(1, dtype=torch.int32, device=pools[0].device)

    @staticmethod
    def why_not(specs: Sequence[AttentionSpec]) -> str | None:
        """Why the kernels cannot attend as the specs say, or None."""
        missing = lacking(attention_features(specs), KERNELS)
        if missing is None and specs[0].head_dim > MAX_HEAD_DIM:
            return f"the attention kernels have no heads of {specs[0].head_dim}; {MAX_HEAD_DIM} is the most"
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
        stream = gluon_kernels("stream")
        return stream is not None and self._block_size == stream.BLOCK_SIZE and self._group <= stream.MAX_GROUP

    def stream_sizes(self, num_rows: int) -> StreamSizes | None:
        """How keys of so many decode rows are streamed; None: the kernel in Triton takes them."""
        programs = num_rows * self._num_kv_heads
        if not self._streams or programs > STREAM_PROGRAMS * self._num_cores:
            return None
        sizes = FEW_ROWS if programs * CORES_A_HEAD <= self._num_cores else MANY_ROWS
        sizes = NARROW if self.pools[0].dtype == FP8 else sizes
        sizes = LARGE_HEADS if self._head_dim > LARGE else sizes
        return sizes if sizes.programs_a_core * self._num_cores >= self._num_kv_heads else None

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
        decodes, chunks = self.decodes(batch), self.chunks(batch)
        return self._beside(*decodes, *chunks) if decodes and chunks else self.in_order((*decodes, *chunks))

    def _beside(self, decodes: Part, chunks: Part) -> Attend:
        """Both at the same time: decode rows wait for memory, chunks for the matrix units."""

        def attend(layer: int, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            args = layer, heads, rotation, self._make_out(heads)
            beside(partial(chunks, *args), partial(decodes, *args))
            return args[-1].flatten(1)

        return attend

    def in_order(self, parts: Sequence[Part]) -> Attend:
        """The function that does a layer's parts in order."""

        def attend(layer: int, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            out = self._make_out(heads)
            for part in parts:
                out = part(layer, heads, rotation, out)
            return out.flatten(1)

        return attend

    def _make_out(self, heads: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(heads), self._num_heads, self._head_dim, dtype=heads.dtype, device=heads.device)

    def decodes(self, batch: AttentionBatch) -> list[Part]:
        """The work for the decode rows; empty where there are none."""
        return [partial(self._attend_decodes, batch)] if batch.num_decodes else []

    def chunks(self, batch: AttentionBatch) -> list[Part]:
        """The work for the chunks; empty where there are none."""
        if batch.num_chunk_tokens == 0:
            return []
        size = PREFILL_BLOCK_M if self._hopper is None else self._hopper.tokens_a_tile
        tiles = cut(
            batch.chunk_rows, batch.chunk_offsets, batch.chunk_starts, batch.chunk_ends, batch.num_chunk_tokens, size
        )
        return [partial(self._attend_chunks, batch, tiles)]

    def _places(self, batch: AttentionBatch, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots of the batch's tokens and the block tables, as the layer's group has them."""
        group = self._groups[layer]
        return batch.slots[group], batch.tables[group]

    def _attend_decodes(
        self, batch: AttentionBatch, layer: int, heads: torch.Tensor, rotation: Rotation, out: torch.Tensor
    ) -> torch.Tensor:
        if sizes := self.stream_sizes(batch.num_decodes):
            self._stream(batch, layer, heads, rotation, out, sizes)
            return out
        splits = self.num_splits(batch.num_decodes)
        ahead = self.loads_ahead(batch.num_decodes)
        slots, table = self._places(batch, layer)
        options, norm, sinks = self._options[layer], rotation.norm_weight, rotation.sinks
        decode[(batch.num_decodes, self._num_kv_heads, splits)](
            heads, rotation.cos_sin, heads if norm is None else norm, heads if sinks is None else sinks,
            self.pools[layer], slots, table, batch.decode_rows, batch.decode_lengths, out, *self._scratch,
            rotation.eps, options.scale, options.k_unit, options.v_unit, table.stride(0),
            NUM_KV=self._num_kv_heads, GROUP=self._group, BLOCK_G=self._block_g,
            GROUP_2=triton.next_power_of_2(self._group),
            BLOCK_SIZE=self._block_size, BLOCK_N=64 if ahead else 32, NUM_SPLITS=splits, AHEAD=ahead,
            HAS_NORM=norm is not None, num_warps=2 * self.num_warps if ahead else self.num_warps, num_stages=2,
            **options.constants(has_sinks=sinks is not None), **self._shape(), **pdl(),
        )  # fmt: skip
        return out

    def _stream(
        self,
        batch: AttentionBatch,
        layer: int,
        heads: torch.Tensor,
        rotation: Rotation,
        out: torch.Tensor,
        sizes: StreamSizes,
    ) -> None:
        from gapless.kernels.stream import stream_decode  # on Hopper alone

        count = batch.num_decodes
        slots, table = self._places(batch, layer)
        options, norm, sinks = self._options[layer], rotation.norm_weight, rotation.sinks
        stream_decode[(sizes.programs_a_core * self._num_cores,)](
            heads, rotation.cos_sin, heads if norm is None else norm, heads if sinks is None else sinks,
            self.pools[layer], slots, table, batch.decode_rows, batch.decode_lengths, out, *self._scratch,
            rotation.eps, options.scale, options.k_unit, options.v_unit, table.stride(0), count,
            NUM_KV=self._num_kv_heads, GROUP=self._group, GROUP_2=triton.next_power_of_2(self._group),
            HEAD_DIM=self._head_dim, LENGTHS=max(32, triton.next_power_of_2(count)), MIN_SHARE=sizes.min_share,
            NUM_STAGES=sizes.num_stages, HAS_NORM=norm is not None, **options.constants(has_sinks=sinks is not None),
            num_warps=sizes.num_warps, launch_pdl=True,
        )  # fmt: skip

    def _attend_chunks(
        self,
        batch: AttentionBatch,
        tiles: torch.Tensor,
        layer: int,
        heads: torch.Tensor,
        rotation: Rotation,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Tokens from the first chunk on are stored, padding too; those in the tiles attend."""
        slots, table = self._places(batch, layer)
        pool, options, sinks = self.pools[layer], self._options[layer], rotation.sinks
        q = self.store(layer, heads, rotation, slots, batch.chunk_offsets, len(heads))
        if self._hopper is not None:
            self._hopper(q, pool, table, tiles, out, options, sinks)
            return out
        prefill[(self._num_heads, len(tiles) - 1)](
            q, q if sinks is None else sinks, pool, table, tiles, out, options.scale, options.v_unit, table.stride(0),
            NUM_HEADS=self._num_heads, NUM_KV=self._num_kv_heads, SIZE=SIZE.value,
            BLOCK_SIZE=self._block_size, BLOCK_M=PREFILL_BLOCK_M, BLOCK_N=64, num_warps=4, num_stages=2,
            **options.constants(has_sinks=sinks is not None), **self._shape(),
        )  # fmt: skip
        return out

    def store(
        self,
        layer: int,
        heads: torch.Tensor,
        rotation: Rotation,
        slots: torch.Tensor,
        first: torch.Tensor | None,
        end: int,
    ) -> torch.Tensor:
        """Write keys and values of the batch's tokens from `first` to `end` into the layer's pool; return the queries.

        first: on the device, [>= 1]; None: from the first token on. Queries before it are undefined.
        """
        total, head_dim = heads.shape[1:]
        q = torch.empty(end, self._num_heads, head_dim, dtype=heads.dtype, device=heads.device)
        norm, options = rotation.norm_weight, self._options[layer]
        rotate_and_store[(end,)](
            heads, rotation.cos_sin, heads if norm is None else norm, self.pools[layer], slots, q,
            self._none_before if first is None else first, rotation.eps, options.k_unit, options.v_unit,
            NUM_HEADS=self._num_heads, NUM_KV=self._num_kv_heads, HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim // 2), BLOCK_H=min(HEADS_A_TIME, triton.next_power_of_2(total)),
            HAS_NORM=norm is not None, num_warps=4,
        )  # fmt: skip
        return q

    def _shape(self) -> dict[str, Any]:
        return {
            "HEAD_DIM": self._head_dim,
            "BLOCK_D": self._block_d,
            "PRECISION": self._precision,
        }


def score_options(spec: AttentionSpec, units: KVUnits) -> ScoreOptions:
    """What the kernels are told of a layer."""
    return ScoreOptions(spec.scale * units.k * LOG2_E, spec.window or 0, spec.soft_cap or 0.0, units.k, units.v)
