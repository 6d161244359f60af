"""The contract of paged attention: a step's batch, and the function that models call for each layer.

`attend(layer, q, k, v)` first stores k and v of all the step's tokens, then attends; a token sees every earlier
position of its own row, whoever wrote it. Knows block tables and lengths, not requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

# (layer, q [n, num_heads, head_dim], k and v [n, num_kv_heads, head_dim]) -> [n, num_heads * head_dim]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Span:
    """Where one chunk lies among the step's tokens, and in its row. Host numbers."""

    offset: int  # of its first token in the batch
    start: int  # position of that token in the row
    count: int

    @property
    def length(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A step as attention sees it: one token for each decode row, then the chunks end to end."""

    slots: torch.Tensor  # [num_tokens] int64, device: where each token's k and v go
    decode_tables: torch.Tensor  # [num_decodes, max_blocks] int64, device
    decode_lengths: torch.Tensor  # [num_decodes] int64, device: this step's token included
    max_decode_length: int
    chunk_tables: torch.Tensor  # [num_chunks, max_blocks] int64, device
    chunks: tuple[Span, ...]

    @property
    def num_decodes(self) -> int:
        return len(self.decode_lengths)


class Attention(Protocol):
    """A backend. `begin` does once a step what all layers share."""

    def begin(self, batch: AttentionBatch) -> Attend:
        """The function to call for each layer of this step."""
