"""What graphs record: the two halves of a step, on tensors that stay where they are.

A captured step reads its plan from `packed` and leaves its results in `out`, whatever its shape. Between the halves lie
the logits. Knows no graphs: who plays the halves, records them or runs them.
"""

from __future__ import annotations

import torch

from gapless.attention.base import AttentionBatch
from gapless.core.limits import Limits
from gapless.core.params import MAX_LOGPROBS
from gapless.core.plan import score_width
from gapless.core.row_fields import ALL_NEEDS
from gapless.kernels.baggage import take_in_baggage
from gapless.kernels.ends import DecodeInputs, begin, end
from gapless.kernels.mixed import MixedInputs, begin_mixed, end_mixed
from gapless.runner.draw import score_samples
from gapless.runner.ladder import Shape
from gapless.runner.mixed import mixed_capacity
from gapless.runner.processors import SampledRows
from gapless.runner.row_store import RowStore
from gapless.runner.step import Inputs, Outputs, Predicted, Step

NO_BLOCK = -1
StaticInputs = DecodeInputs | MixedInputs


class Halves:
    """The halves of steps of any shape, one step at a time."""

    def __init__(
        self, rows: RowStore, limits: Limits, device: torch.device, vocab_size: int, *, processed: bool = False
    ) -> None:
        """processed: logits processors may come between the halves."""
        self._rows = rows
        self._limits = limits
        self.packed = torch.zeros(mixed_capacity(limits), dtype=torch.int32, device=device)
        # tokens of samples, then their scores
        self.out = torch.zeros(limits.num_rows * (1 + score_width(MAX_LOGPROBS)), dtype=torch.int32, device=device)
        self.scores = self.out[limits.num_rows :]
        self.hidden = self.packed[:0]  # hidden states of the last step that had chunks
        # where processors change a copy of the logits; what they leave is sampled from
        shape = limits.num_rows, vocab_size
        self.logits = torch.zeros(shape, dtype=torch.float32, device=device) if processed else None

    def padding(self, shape: Shape) -> StaticInputs:
        """Inputs of this shape, and in `packed` a plan that is padding alone."""
        device = self.packed.device
        if shape.has_chunks:
            self.packed.zero_()
            return MixedInputs(shape.num_rows, shape.num_tokens, self._limits.num_groups, device)
        rows, rest = self.packed[: decode_size(shape.num_rows, self._limits)].tensor_split([shape.num_rows])
        rows.fill_(self._limits.num_rows)
        rest.fill_(NO_BLOCK)
        return DecodeInputs(shape.num_rows, self._limits.num_groups, device)

    def play(self, step: Step, inputs: StaticInputs) -> None:
        """Both halves, for greedy rows without scores."""
        self.finish(step, inputs, self.predict(step, inputs), is_plain=True)

    def rehearse(self, step: Step, shape: Shape) -> None:
        """Everything that steps of this shape launch."""
        inputs = self.padding(shape)
        predicted = self.predict(step, inputs)
        for is_plain in (False, True):
            self.finish(step, inputs, predicted, is_plain)

    @torch.inference_mode()
    def predict(self, step: Step, inputs: StaticInputs) -> Predicted:
        """The first half, from `packed` to the logits."""
        if isinstance(inputs, MixedInputs):
            found = self._begin_mixed(step, inputs)
        else:
            found = self._begin_decode(step, inputs)
        if self.logits is not None:
            self.logits[: len(found.logits)].copy_(found.logits)
        return found

    @torch.inference_mode()
    def finish(self, step: Step, inputs: StaticInputs, predicted: Predicted, is_plain: bool) -> None:
        """The second half, to `out`."""
        if isinstance(inputs, MixedInputs):
            self._end_mixed(step, inputs, predicted, is_plain)
        else:
            self._end_decode(step, inputs, predicted, is_plain)

    def _to_sample_from(self, predicted: Predicted) -> torch.Tensor | None:
        return None if self.logits is None else self.logits[: len(predicted.logits)]

    def _begin_decode(self, step: Step, inputs: DecodeInputs) -> Predicted:
        """One token of each row: the same step, between two kernels of its own."""
        rows = self._rows
        begin(self.packed, rows.last_token, rows.length, rows.blocks, self._limits.block_size, inputs)
        return step.predict(Inputs(inputs.ids, inputs.positions, self._decode_batch(inputs)))

    def _end_decode(self, step: Step, inputs: DecodeInputs, predicted: Predicted, is_plain: bool) -> None:
        rows, size = self._rows, inputs.batch
        sampled = SampledRows(inputs.rows, inputs.lengths, rows.state)
        found = step.sample(predicted, sampled, 0 if is_plain else ALL_NEEDS, self._to_sample_from(predicted))
        counts = None if is_plain else rows.counts
        end(found.tokens, inputs, rows.last_token, rows.length, counts, self.out)
        if not is_plain:
            total = decode_size(size, self._limits)
            self._score(found, self.packed[total - 1 - size : total - 1], self.packed[total - 1 : total])

    def _decode_batch(self, inputs: DecodeInputs) -> AttentionBatch:
        nothing = self.packed[:0]
        return AttentionBatch(
            slots=inputs.slots.unbind(0),
            tables=self._rows.tables,
            decode_rows=inputs.rows,
            decode_lengths=inputs.lengths,
            max_decode_length=self._limits.max_model_len,
            num_chunk_tokens=0,
            chunk_rows=nothing,
            chunk_offsets=nothing,
            chunk_starts=nothing,
            chunk_ends=nothing,
            chunks=(),
        )

    def _begin_mixed(self, step: Step, inputs: MixedInputs) -> Predicted:
        """Any step with chunks."""
        rows, limits = self._rows, self._limits
        kept = rows.last_token, rows.length
        begin_mixed(self.packed, *kept, rows.blocks, rows.seats, limits.block_size, limits.max_new_blocks, inputs)
        take_in_baggage(self.packed, rows.counts, rows.biases)
        found = step.predict(Inputs(inputs.ids, inputs.positions, self._mixed_batch(inputs), inputs.sample_tokens))
        if len(self.hidden) == 0:
            self.hidden = torch.empty_like(found.hidden)  # the largest shape is played first
        self.hidden[: len(found.hidden)].copy_(found.hidden)
        return found

    def _end_mixed(self, step: Step, inputs: MixedInputs, predicted: Predicted, is_plain: bool) -> None:
        rows = self._rows
        sampled = SampledRows(inputs.sample_rows, inputs.sample_places, rows.state)
        found = step.sample(predicted, sampled, 0 if is_plain else ALL_NEEDS, self._to_sample_from(predicted))
        end_mixed(self.packed, found.tokens, inputs, rows.last_token, rows.length, rows.counts, self.out)
        if not is_plain:
            self._score(found, inputs.score_places, inputs.num_top)

    def _mixed_batch(self, inputs: MixedInputs) -> AttentionBatch:
        return AttentionBatch(
            slots=inputs.slots.unbind(0),
            tables=self._rows.tables,
            decode_rows=inputs.decode_rows,
            decode_lengths=inputs.decode_lengths,
            max_decode_length=self._limits.max_model_len,
            chunk_rows=inputs.chunk_rows,
            chunk_offsets=inputs.chunk_offsets,
            chunk_starts=inputs.chunk_starts,
            chunk_ends=inputs.chunk_ends,
            chunks=(),
            num_chunk_tokens=inputs.num_tokens,
        )

    def _score(self, found: Outputs, places: torch.Tensor, num_top: torch.Tensor) -> None:
        score_samples(found.logits, found.tokens, places, num_top, self.scores, found.basis)


def decode_size(num_rows: int, limits: Limits) -> int:
    """Numbers that a decode step reads: rows, their new blocks, the places of their scores, and num_top."""
    return (2 + limits.num_groups) * num_rows + 1
