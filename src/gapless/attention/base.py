"""The contract of paged attention: a step's batch, and the function that models call for each layer.

`attend(layer, heads, rotation)` rotates queries and keys, stores k and v of all the step's tokens, then attends as the
layer's spec says. A token sees the earlier positions of its own row, within its window where the layer has one,
whichever step wrote them. Knows block tables and lengths, not requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Rotation(Protocol):
    """The operations on queries and keys before attention: an optional norm of each head, then rope; and the sinks."""

    @property
    def cos_sin(self) -> torch.Tensor:
        """[num_tokens, 2, head_dim]: cos and signed sin of each token's position."""

    @property
    def norm_weight(self) -> torch.Tensor | None:
        """[num_heads + num_kv_heads, head_dim], or None when heads are not normalized."""

    @property
    def eps(self) -> float:
        """Of the norm."""

    @property
    def sinks(self) -> torch.Tensor | None:
        """[num_heads]: a score of each head that takes part in the softmax and has no value."""

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """Queries and keys [n, num_heads + num_kv_heads, head_dim], normalized and rotated."""


FP8 = torch.float8_e4m3fn  # of a narrow KV cache
MAX_FP8 = 448.0


# (layer, heads [n, num_heads + 2 * num_kv_heads, head_dim]: q, k, v, rotation) -> [n, num_heads * head_dim]
Attend = Callable[[int, torch.Tensor, Rotation], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Span:
    """The place of one chunk among the step's tokens, and in its row. Host numbers."""

    offset: int  # of its first token in the batch
    start: int  # position of that token in the row
    count: int

    @property
    def length(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A step as attention sees it: one token for each decode row, then the chunks end to end.

    In a captured step only sizes are known to the host. Its decode rows are filled up with a row of padding, of
    length 0; the places that these have among the tokens are those of chunks, so nothing may be written there. Its
    chunks are filled up with empty ones, and tokens behind the last chunk are padding.
    """

    # of each group of layers; entries of a table that lie before a layer's window are never used
    slots: tuple[torch.Tensor, ...]  # [num_tokens] int64, device: where each token's k and v go
    tables: tuple[torch.Tensor, ...]  # [num_rows, max_blocks] int64, device: every row's block table
    decode_rows: torch.Tensor  # [num_decodes] int64, device
    decode_lengths: torch.Tensor  # [num_decodes] int64, device: this step's token included
    max_decode_length: int
    num_chunk_tokens: int  # of all chunks together, at most; 0: there are no chunks
    chunk_rows: torch.Tensor  # [num_chunks] int32, device; a chunk whose start is its end has no tokens
    chunk_offsets: torch.Tensor  # [num_chunks] int32, device: first token in the batch
    chunk_starts: torch.Tensor  # [num_chunks] int32, device: position of that token in the row
    chunk_ends: torch.Tensor  # [num_chunks] int32, device: the row's length after the step
    chunks: tuple[Span, ...]  # the same for the host; empty in a captured step

    @property
    def num_decodes(self) -> int:
        return len(self.decode_rows)


class Attention(Protocol):
    """A backend. `begin` does once a step what all layers share.

    Each says by a static method `why_not(specs)`, before any memory is taken, what of the layers' specs it cannot do.
    """

    def begin(self, batch: AttentionBatch) -> Attend:
        """The function to call for each layer of this step."""
