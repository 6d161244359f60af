"""One step's work, described without tensors: what the scheduler hands to the executor.

A plan is a value. Everything the device side must learn for the step is in it: which rows decode, which chunks are
prefilled, which rows have a new owner, which blocks were added to which table.
"""

from __future__ import annotations

from dataclasses import dataclass

from gapless.core.params import SamplingParams
from gapless.core.request import IntArray, LongArray


@dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens of one row that are fed to the model, from position `start` on."""

    row: int
    epoch: int
    start: int
    tokens: IntArray
    samples: bool  # the chunk reaches the last known token, so the step samples the next one

    @property
    def length(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Seat:
    """What the device must know of a row's new owner."""

    row: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    min_total: int  # no stop token may be sampled into a place before this one, counted from 1


@dataclass(frozen=True, slots=True)
class Plan:
    """One forward pass. Tokens lie in this order: one for each decode row, then the chunks end to end."""

    step: int
    decode_rows: IntArray  # [num_decodes] rows whose input token is in the device's row
    chunks: tuple[Chunk, ...]
    seats: tuple[Seat, ...]  # rows with a new owner
    new_blocks: IntArray  # [num_new_blocks, 3] row, index in the row's table, block
    sample_rows: IntArray  # [num_samples] decode rows, then the rows of sampling chunks
    sample_epochs: LongArray  # [num_samples] who owned them when the step was planned
    max_decode_length: int  # longest decode row, this step's token included; 0 without decodes
    any_random: bool  # some sampled row has a temperature above 0
    any_filtered: bool  # some sampled row uses top-k, top-p or min-p
    any_min_tokens: bool  # some sampled row may not stop yet

    @property
    def num_decodes(self) -> int:
        return len(self.decode_rows)

    @property
    def num_samples(self) -> int:
        return len(self.sample_rows)

    @property
    def num_tokens(self) -> int:
        return len(self.decode_rows) + sum(len(chunk.tokens) for chunk in self.chunks)
