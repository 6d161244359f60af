"""One step's work, described without tensors: the scheduler hands it to the executor.

A plan is a value. It has everything that the device must know for the step: the rows that decode, the chunks to
prefill, the rows with a new owner, and the blocks added to each table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gapless.core.baggage import NO_BAGGAGE, Baggage
from gapless.core.request import IntArray, LongArray, int_array
from gapless.core.row_fields import SEAT_WORDS

NOTHING = int_array(np.empty(0, np.int32))
NO_SEATS = int_array(np.empty((0, SEAT_WORDS), np.int32))
NO_COPIES = int_array(np.empty((0, 2), np.int32))
NO_SAMPLE = -1  # in place of a sampled token: the largest logit was not a finite number
NO_MORE = -3  # in the slots behind the last sample of a row that was promised several


@dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens of one row that are fed to the model, from position `start` on."""

    row: int
    epoch: int
    start: int
    tokens: IntArray
    samples: bool  # the chunk reaches the last known token, so the step samples the next one
    targets: IntArray = field(default_factory=lambda: NOTHING)  # prompt tokens whose log-probabilities are requested
    scored_from: int = 0  # the position that the first target follows; the last may lie beyond the chunk

    @property
    def length(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """One forward pass. Tokens lie in this order: those of the decode rows, then the chunks end to end.

    A decode row feeds what the device holds: one token, or with a width of more a draft of so many, of which it keeps
    as many as it verifies. It brings at least one sample and at most its width.
    """

    step: int
    decode_rows: IntArray  # [num_decodes] rows whose input token is in the device's row
    chunks: tuple[Chunk, ...]
    new_blocks: IntArray  # [num_new_blocks, 2 + num_groups] row, index in its tables, block of each group of layers
    sample_rows: IntArray  # [num_samples] decode rows, then the rows of sampling chunks
    sample_epochs: LongArray  # [num_samples] of their owners when the step was planned
    max_decode_length: int  # longest decode row, this step's token included; 0 without decodes
    needs: int = 0  # fields (row_fields.need) that are not neutral in some sampled row
    seat_rows: IntArray = field(default_factory=lambda: NOTHING)  # [num_seats] rows with a new owner
    seats: IntArray = field(default_factory=lambda: NO_SEATS)  # [num_seats, SEAT_WORDS] what to know of them
    baggage: Baggage = NO_BAGGAGE  # of new owners
    decode_widths: IntArray = field(default_factory=lambda: NOTHING)  # [num_decodes]; empty where all are 1
    block_copies: IntArray = field(default_factory=lambda: NO_COPIES)  # [n, 2] from, to: before the step writes
    mask_samples: IntArray = field(default_factory=lambda: NOTHING)  # which of the samples get a new mask first
    process_samples: IntArray = field(default_factory=lambda: NOTHING)  # which of the samples have logits processors
    waits: bool = False  # some of these masks or processors follow from samples of steps in flight
    score_samples: IntArray = field(default_factory=lambda: NOTHING)  # which of the samples want log-probabilities
    num_top: int = 0  # likeliest tokens to give with each of them, and with each target of a chunk
    num_chunk_tokens: int = field(init=False)
    num_targets: int = field(init=False)  # prompt tokens whose log-probabilities the step returns

    def __post_init__(self) -> None:
        """Count once what each stage asks for."""
        object.__setattr__(self, "num_chunk_tokens", sum([len(chunk.tokens) for chunk in self.chunks]))
        object.__setattr__(self, "num_targets", sum([len(chunk.targets) for chunk in self.chunks]))

    @property
    def num_decodes(self) -> int:
        return len(self.decode_rows)

    @property
    def num_groups(self) -> int:
        """Groups of layers, each with block tables of its own."""
        return int(self.new_blocks.shape[1]) - 2

    @property
    def num_samples(self) -> int:
        return len(self.sample_rows)

    @property
    def is_split(self) -> bool:
        """Whether the step is launched in two halves: something comes between logits and tokens."""
        return len(self.mask_samples) > 0 or len(self.process_samples) > 0

    @property
    def sample_widths(self) -> LongArray:
        """Samples that each of the sampled rows may bring at most."""
        widths = np.ones(len(self.sample_rows), np.int64)
        widths[: len(self.decode_widths)] = self.decode_widths
        return widths

    @property
    def num_slots(self) -> int:
        """Places for samples in the step's results."""
        return len(self.sample_rows) + (self._num_extra if len(self.decode_widths) else 0)

    @property
    def num_tokens(self) -> int:
        extra = self._num_extra if len(self.decode_widths) else 0
        return len(self.decode_rows) + extra + self.num_chunk_tokens

    @property
    def _num_extra(self) -> int:
        """Tokens of drafts, beyond one for each decode row."""
        return int(self.decode_widths.sum()) - len(self.decode_rows)

    @property
    def num_scores(self) -> int:
        """Positions whose log-probabilities the step returns: the samples that need them, then the chunks' targets."""
        return len(self.score_samples) + self.num_targets

    @property
    def num_results(self) -> int:
        """Numbers that the step gives back: the slots of the samples, then the scores."""
        num_scores = self.num_scores
        return self.num_slots + (num_scores * score_width(self.num_top) if num_scores else 0)


def score_width(num_top: int) -> int:
    """Numbers of a score: log-probability and rank of a token, the likeliest tokens, their log-probabilities.

    All are int32; log-probabilities are the bits of float32.
    """
    return 2 + 2 * num_top
