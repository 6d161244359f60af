"""Packs what a plan says into one array of int32, and reads it back on the device as views.

One array is one copy a step. Both sides walk the same list of sections, so neither can get the order wrong. Numbers
that only steer the launch (sizes, spans) stay in the plan on the host.

    decode_rows | chunk_tokens | chunk_positions | chunk_token_rows | chunk_rows | chunk_offsets | chunk_starts
    | chunk_ends | sample_tokens | sample_rows | score_samples | score_tokens | score_targets
    | new_blocks (row, index, block of each group) | seat_rows | seats (SEAT_WORDS numbers each)
    | block_copies (from, to) | count_rows | counts (row, token, count) | biases (row, index, token, bits of a float32)

The results are one array too: the sampled tokens, then the scores (`plan.score_width` numbers each).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from gapless.core.baggage import BIAS_WORDS, COUNT_WORDS, NO_BAGGAGE, Baggage
from gapless.core.limits import Limits
from gapless.core.params import MAX_LOGPROBS
from gapless.core.plan import NOTHING, Plan, score_width
from gapless.core.request import IntArray
from gapless.core.row_fields import SEAT_WORDS
from gapless.runner.ladder import Shape


@dataclass(frozen=True, slots=True)
class Sections:
    """How many numbers each section of a packed plan has, in order."""

    num_decodes: int
    num_chunk_tokens: int
    num_chunks: int
    num_samples: int
    num_score_samples: int
    num_targets: int
    num_new_blocks: int
    num_seats: int
    num_groups: int = 1  # of layers
    num_block_copies: int = 0
    num_counted: int = 0
    num_counts: int = 0
    num_biases: int = 0

    @classmethod
    def of(cls, plan: Plan) -> Sections:
        num_score_samples = len(plan.score_samples)
        return cls(
            plan.num_decodes,
            plan.num_chunk_tokens,
            len(plan.chunks),
            plan.num_samples,
            num_score_samples,
            plan.num_targets,
            len(plan.new_blocks),
            len(plan.seat_rows),
            plan.num_groups,
            len(plan.block_copies),
            len(plan.baggage.count_rows),
            len(plan.baggage.counts),
            len(plan.baggage.biases),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        tokens, chunks, samples = self.num_chunk_tokens, self.num_chunks, self.num_samples
        return (
            self.num_decodes,
            tokens,
            tokens,
            tokens,
            chunks,
            chunks,
            chunks,
            chunks,
            samples,
            samples,
            self.num_score_samples,
            self.num_targets,
            self.num_targets,
            (2 + self.num_groups) * self.num_new_blocks,
            self.num_seats,
            self.num_seats * SEAT_WORDS,
            2 * self.num_block_copies,
            self.num_counted,
            COUNT_WORDS * self.num_counts,
            BIAS_WORDS * self.num_biases,
        )

    @property
    def total(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Filled:
    """A plan in a slot, and what its step must know beside it."""

    plan: Plan
    size: int  # numbers that were packed; 0 where the device has them all already
    shape: Shape | None = None  # of the graph to replay; None: run it as it is


@dataclass(frozen=True, slots=True)
class Packed:
    """Views of a packed plan on the device. int32, except where said."""

    decode_rows: torch.Tensor  # [num_decodes]
    chunk_tokens: torch.Tensor  # [num_chunk_tokens]
    chunk_positions: torch.Tensor  # [num_chunk_tokens]
    chunk_token_rows: torch.Tensor  # [num_chunk_tokens]
    chunk_rows: torch.Tensor  # [num_chunks]
    chunk_offsets: torch.Tensor  # [num_chunks] its first token among the step's
    chunk_starts: torch.Tensor  # [num_chunks] its position in the row
    chunk_ends: torch.Tensor  # [num_chunks] the row's length after the step
    sample_tokens: torch.Tensor  # [num_samples] which of the step's tokens is followed by a sample
    sample_rows: torch.Tensor  # [num_samples]
    score_samples: torch.Tensor  # [num_score_samples] which of the samples want log-probabilities
    score_tokens: torch.Tensor  # [num_targets] which of the step's tokens is followed by a target
    score_targets: torch.Tensor  # [num_targets] the prompt tokens whose log-probabilities are wanted
    new_blocks: torch.Tensor  # [num_new_blocks, 2 + num_groups]
    seat_rows: torch.Tensor  # [num_seats]
    seats: torch.Tensor  # [num_seats, SEAT_WORDS]
    block_copies: torch.Tensor  # [num_block_copies, 2] from, to
    count_rows: torch.Tensor  # [num_counted] rows whose counts begin anew
    counts: torch.Tensor  # [num_counts, 3] row, token, count
    biases: torch.Tensor  # [num_biases, 4] row, index, token, bits of a float32


def capacity(limits: Limits) -> int:
    """Numbers that any plan within the limits packs into."""
    rows, tokens, groups = limits.num_rows, limits.max_batch_tokens, limits.num_groups
    plan = Sections(rows, tokens, rows, rows, rows, tokens, limits.max_new_blocks, rows, groups, rows)
    return plan.total + limits.max_baggage


def result_capacity(limits: Limits) -> int:
    """Numbers that any step gives back at most: a sample for each row, and a score for each token it was fed."""
    return limits.num_rows + limits.max_batch_tokens * score_width(MAX_LOGPROBS)


def fill(plan: Plan, out: IntArray) -> int:
    """Write the plan into `out`, which the caller owns until the copy is over; return how many numbers it took."""
    assert len(plan.decode_widths) == 0, "no runner verifies drafts yet"
    parts: list[IntArray] = [plan.decode_rows]
    if plan.chunks:
        parts += _chunk_parts(plan)
    parts += [_sample_tokens(plan), plan.sample_rows]
    if plan.num_scores:
        parts += [plan.score_samples, *target_parts(plan)]
    parts += [plan.new_blocks.reshape(-1), plan.seat_rows, plan.seats.reshape(-1), plan.block_copies.reshape(-1)]
    if plan.baggage is not NO_BAGGAGE:
        parts += baggage_parts(plan.baggage)
    end = 0
    for part in parts:
        start, end = end, end + len(part)
        out[start:end] = part
    return end


def unpack(packed: torch.Tensor, sections: Sections) -> Packed:
    """Views of the sections of a packed plan."""
    *head, new_blocks, seat_rows, seats, copies, count_rows, counts, biases = torch.split(
        packed[: sections.total], list(sections.sizes)
    )
    entries = new_blocks.view(-1, 2 + sections.num_groups)
    owners = (entries, seat_rows, seats.view(-1, SEAT_WORDS), copies.view(-1, 2))
    baggage = (count_rows, counts.view(-1, COUNT_WORDS), biases.view(-1, BIAS_WORDS))
    return Packed(*(*head, *owners, *baggage))


def baggage_parts(baggage: Baggage) -> list[IntArray]:
    """In the order in which they are packed."""
    return [baggage.count_rows, baggage.counts.reshape(-1), baggage.biases.reshape(-1)]


def _chunk_parts(plan: Plan) -> list[IntArray]:
    chunks = plan.chunks
    counts = [len(chunk.tokens) for chunk in chunks]
    offsets = accumulate(counts[:-1], initial=plan.num_decodes)
    words = [(chunk.row, offset, chunk.start, chunk.length) for chunk, offset in zip(chunks, offsets, strict=True)]
    rows, *others = np.array(words, np.int32).T
    positions = [np.arange(chunk.start, chunk.length, dtype=np.int32) for chunk in chunks]
    tokens = [chunk.tokens for chunk in chunks]
    return [np.concatenate(tokens), np.concatenate(positions), np.repeat(rows, counts), rows, *others]


def _sample_tokens(plan: Plan) -> IntArray:
    decodes = np.arange(plan.num_decodes, dtype=np.int32)
    if not plan.chunks:
        return decodes
    ends = accumulate([len(chunk.tokens) for chunk in plan.chunks], initial=plan.num_decodes - 1)
    next(ends)  # of the decode rows
    samples = [end for chunk, end in zip(plan.chunks, ends, strict=True) if chunk.samples]
    return np.concatenate((decodes, np.array(samples, np.int32)))


def target_parts(plan: Plan) -> list[IntArray]:
    """Where the logits of each target come from, and the targets."""
    offset = plan.num_decodes
    places: list[IntArray] = [NOTHING]
    for chunk in plan.chunks:
        first = offset + chunk.scored_from - chunk.start
        if len(chunk.targets):
            places.append(np.arange(first, first + len(chunk.targets), dtype=np.int32))
        offset += len(chunk.tokens)
    return [np.concatenate(places), np.concatenate([NOTHING, *(chunk.targets for chunk in plan.chunks)])]
