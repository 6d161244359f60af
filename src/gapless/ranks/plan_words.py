"""A plan as words of 32 bits, on their way to other ranks, and back.

Only what a step's model needs is sent: masks and logits processors matter where tokens are drawn, which rank 0 does
alone. One side writes the sections in the order in which the other takes them.

    sizes (int64) | sample_epochs (int64) | decode_rows | sample_rows | new_blocks | seat_rows | seats | block_copies
    | count_rows | counts | biases | score_samples | of each chunk: row, start, samples, scored_from, epoch (int64),
    its numbers of tokens and targets | tokens and targets of each chunk
"""

from __future__ import annotations

import numpy as np

from gapless.core.baggage import BIAS_WORDS, COUNT_WORDS, NO_BAGGAGE, Baggage
from gapless.core.limits import Limits
from gapless.core.plan import Chunk, Plan
from gapless.core.request import IntArray, LongArray
from gapless.core.row_fields import SEAT_WORDS

_NUM_SIZES = 15
_CHUNK_WORDS = 8


def plan_capacity(limits: Limits, packed: int) -> int:
    """Words that any plan takes. packed: what it takes as `runner.fill` packs it, which repeats much of a chunk."""
    return packed + 2 * _NUM_SIZES + (2 + _CHUNK_WORDS) * limits.num_rows


def write_plan(plan: Plan, out: IntArray) -> int:
    """Write the plan; return how many words it took."""
    assert len(plan.decode_widths) == 0, "no runner verifies drafts yet"
    baggage, chunks = plan.baggage, plan.chunks
    sizes = np.array(
        (
            *(plan.step, plan.needs, plan.max_decode_length, plan.num_top),
            *(plan.num_decodes, plan.num_samples, len(plan.new_blocks), plan.num_groups, len(plan.seat_rows)),
            *(len(plan.block_copies), len(baggage.count_rows), len(baggage.counts), len(baggage.biases)),
            *(len(plan.score_samples), len(chunks)),
        ),
        np.int64,
    )
    parts = [sizes.view(np.int32), plan.sample_epochs.view(np.int32), plan.decode_rows, plan.sample_rows]
    parts += [plan.new_blocks.reshape(-1), plan.seat_rows, plan.seats.reshape(-1), plan.block_copies.reshape(-1)]
    parts += [baggage.count_rows, baggage.counts.reshape(-1), baggage.biases.reshape(-1), plan.score_samples]
    parts += [_chunk_words(chunk) for chunk in chunks]
    for chunk in chunks:
        parts += [chunk.tokens, chunk.targets]
    end = 0
    for part in parts:
        start, end = end, end + len(part)
        out[start:end] = part
    return end


def read_plan(words: IntArray) -> Plan:
    """The plan that the words say. Its arrays are views of them."""
    take = _Reader(words)
    sizes = take.longs(_NUM_SIZES).tolist()
    step, needs, max_decode_length, num_top, num_decodes, num_samples, num_new, num_groups, *rest = sizes
    num_seats, num_copies, num_counted, num_counts, num_biases, num_scores, num_chunks = rest
    epochs, decode_rows, sample_rows = take.longs(num_samples), take.words(num_decodes), take.words(num_samples)
    new_blocks = take.table(num_new, 2 + num_groups)
    seat_rows, seats = take.words(num_seats), take.table(num_seats, SEAT_WORDS)
    copies = take.table(num_copies, 2)
    baggage = Baggage(take.words(num_counted), take.table(num_counts, COUNT_WORDS), take.table(num_biases, BIAS_WORDS))
    score_samples = take.words(num_scores)
    heads = [take.words(_CHUNK_WORDS) for _ in range(num_chunks)]
    return Plan(
        step,
        decode_rows,
        tuple(_read_chunk(head, take) for head in heads),
        new_blocks,
        sample_rows,
        epochs,
        max_decode_length,
        needs,
        seat_rows,
        seats,
        baggage if baggage.size else NO_BAGGAGE,
        block_copies=copies,
        score_samples=score_samples,
        num_top=num_top,
    )


def _chunk_words(chunk: Chunk) -> IntArray:
    numbers = (chunk.row, chunk.start, chunk.samples, chunk.scored_from)
    epoch = np.array([chunk.epoch], np.int64).view(np.int32)
    return np.concatenate(
        (np.array(numbers, np.int32), epoch, np.array((len(chunk.tokens), len(chunk.targets)), np.int32))
    )


def _read_chunk(head: IntArray, take: _Reader) -> Chunk:
    row, start, samples, scored_from = head[:4].tolist()
    epoch, (num_tokens, num_targets) = int(head[4:6].view(np.int64)[0]), head[6:].tolist()
    return Chunk(row, epoch, start, take.words(num_tokens), bool(samples), take.words(num_targets), scored_from)


class _Reader:
    """Takes words from the front."""

    def __init__(self, words: IntArray) -> None:
        self._words, self._place = words, 0

    def words(self, count: int) -> IntArray:
        start, self._place = self._place, self._place + count
        return self._words[start : self._place]

    def longs(self, count: int) -> LongArray:
        return self.words(2 * count).view(np.int64)

    def table(self, count: int, width: int) -> IntArray:
        return self.words(count * width).reshape(count, width)
