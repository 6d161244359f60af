"""Attention by optional libraries: FlashAttention-3, and FlashInfer for decode rows.

Norm, rope and KV write stay in our own kernel. The library attends over our pools, seen as pages. Only calls that take
lengths and block tables on the device are used, because a captured graph can contain them and the host plans nothing.
Knows how the libraries are called and what they cannot do, but not when they are worth it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch

from gapless.attention.base import Attend, AttentionBatch, Rotation
from gapless.attention.triton import Part, TritonAttention
from gapless.models.spec import LIBRARY_KERNELS, AttentionSpec, attention_features, lacking

WORKSPACE_BYTES = 128 * 2**20  # for FlashInfer: the size in its documentation


@dataclass(frozen=True, slots=True)
class Pieces:
    """The first tokens of the batch, split into pieces; each piece attends to one row. Tensors on the device."""

    count: int  # of tokens
    table: torch.Tensor  # [num_pieces, max_blocks] int32: the block table of each piece's row
    lengths: torch.Tensor  # [num_pieces] int32: of the rows, the piece included
    begins: torch.Tensor | None = None  # [num_pieces + 1] int32; None: every piece is one token
    longest: int = 1  # most tokens of a piece
    first: torch.Tensor | None = None  # [1] int32: tokens before it are in no piece; None: there are none


# (q [count, num_heads, head_dim], k and v [num_blocks, block_size, num_kv_heads, head_dim], pieces) -> like q
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Pieces], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Library:
    """An optional package, and its limits. `load(scale, device)` imports it and makes its kernel."""

    package: str
    module: str
    load: Callable[[float, torch.device], Kernel]
    head_step: int  # head sizes are multiples of this
    block_sizes: tuple[int, ...] = ()  # empty: any
    has_chunks: bool = True

    def is_installed(self) -> bool:
        return find_spec(self.module) is not None

    def why_not(self, specs: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype) -> str | None:
        """Why it cannot attend as the specs say over such a cache, or None."""
        head_dim = specs[0].head_dim
        if missing := lacking(attention_features(specs), LIBRARY_KERNELS):
            return f"it is not called for {missing}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it knows float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
        if head_dim % self.head_step or head_dim > MAX_HEAD_DIM:
            return f"its head sizes are multiples of {self.head_step} up to {MAX_HEAD_DIM}, not {head_dim}"
        if self.block_sizes and block_size not in self.block_sizes:
            return f"its block sizes are {', '.join(map(str, self.block_sizes))}, not {block_size}"
        return None


def _flash3(scale: float, device: torch.device) -> Kernel:
    attend = import_module("flash_attn_interface").flash_attn_with_kvcache

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: Pieces) -> torch.Tensor:
        cache = {"cache_seqlens": pieces.lengths, "page_table": pieces.table, "softmax_scale": scale, "causal": True}
        found: torch.Tensor
        if pieces.begins is None:
            found = attend(q.unsqueeze(1), k, v, **cache).squeeze(1)
        else:  # one split: parts of thousands of tokens would take memory that was not set aside
            found = attend(q, k, v, cu_seqlens_q=pieces.begins, max_seqlen_q=pieces.longest, num_splits=1, **cache)
        return found

    return kernel


def _flashinfer(scale: float, device: torch.device) -> Kernel:
    attend = import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: Pieces) -> torch.Tensor:
        longest = pieces.table.shape[1] * k.shape[1]
        found: torch.Tensor = attend(
            q, (k, v), workspace, pieces.table, pieces.lengths, longest, bmm1_scale=scale, kv_layout="NHD"
        )
        return found

    return kernel


MAX_HEAD_DIM = 256
LIBRARIES = {
    "flash3": Library("flash-attn-3", "flash_attn_interface", _flash3, head_step=8),
    "flashinfer": Library(
        "flashinfer-python", "flashinfer", _flashinfer, head_step=16, block_sizes=(16, 32, 64, 128), has_chunks=False
    ),
}


class LibraryAttention:
    """Our own attention, with a library's kernel for decode rows, chunks, or both."""

    def __init__(
        self, own: TritonAttention, block_size: int, *, decode: Kernel | None = None, chunks: Kernel | None = None
    ) -> None:
        self._own = own
        self._block_size = block_size
        self._decode = decode
        self._chunks = chunks

    def begin(self, batch: AttentionBatch) -> Attend:
        return self._own.in_order((*self._decode_parts(batch), *self._chunk_parts(batch)))

    def _decode_parts(self, batch: AttentionBatch) -> list[Part]:
        if self._decode is None or batch.num_decodes == 0:
            return self._own.decodes(batch)
        table = batch.tables[0][batch.decode_rows].int()
        pieces = Pieces(batch.num_decodes, table, batch.decode_lengths.int())
        return [partial(self._attend, batch, pieces, self._decode)]

    def _chunk_parts(self, batch: AttentionBatch) -> list[Part]:
        """The chunks' starts come from the device, because different chunks take their place in a captured graph."""
        if self._chunks is None or batch.num_chunk_tokens == 0:
            return self._own.chunks(batch)
        ends = batch.chunk_offsets + batch.chunk_ends - batch.chunk_starts  # in the batch
        pieces = Pieces(
            count=len(batch.slots[0]),
            table=batch.tables[0][batch.chunk_rows].int(),
            lengths=batch.chunk_ends,
            begins=torch.cat((batch.chunk_offsets, ends[-1:])),
            longest=batch.num_chunk_tokens,
            first=batch.chunk_offsets[:1],
        )
        return [partial(self._attend, batch, pieces, self._chunks)]

    def _attend(
        self,
        batch: AttentionBatch,
        pieces: Pieces,
        kernel: Kernel,
        layer: int,
        heads: torch.Tensor,
        rotation: Rotation,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """The library's result is the layer's output, but for tokens that are in no piece."""
        pool = self._own.pools[layer]
        q = self._own.store(layer, heads, rotation, batch.slots[0], pieces.first, pieces.count)
        pages = pool.view(-1, self._block_size, *pool.shape[1:])
        k, v = pages.chunk(2, dim=2)
        found = kernel(q, k, v, pieces)
        if pieces.first is not None:
            place = torch.arange(pieces.count, device=out.device)
            return torch.where((place >= pieces.first)[:, None, None], found, out)
        if pieces.count == len(out):
            return found
        out[: pieces.count] = found
        return out
