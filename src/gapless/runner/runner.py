"""One batch on one device: from a packed plan to sampled tokens.

Owns the rows and the KV cache. Runs on the compute stream; never waits, never looks at a value on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gapless.attention.base import AttentionBatch, Span
from gapless.core.limits import Limits
from gapless.core.plan import Plan
from gapless.core.request import IntArray
from gapless.core.row_fields import PROCESSED_SCORES
from gapless.device.base import Buffer, Device
from gapless.runner.calls import Call, processed
from gapless.runner.fill import Filled, Packed, Sections, fill, unpack
from gapless.runner.kv_store import KVStore
from gapless.runner.processors import SampledRows
from gapless.runner.row_store import RowStore
from gapless.runner.sampler import judged
from gapless.runner.steering import Steering
from gapless.runner.step import Inputs, Outputs, Predicted, Step, Targets, write_scores


@dataclass(frozen=True, slots=True)
class Half:
    """What the first half of a step leaves to the second."""

    packed: Packed
    sampled: SampledRows
    found: Predicted


class Runner:
    """Runs steps. Everything that lasts from step to step is in its buffers."""

    def __init__(self, device: Device, limits: Limits, kv: KVStore, step: Step, slow_reason: str | None = None) -> None:
        """slow_reason: why this runs although a faster runner was wanted, as the ledger says it."""
        self._block_size = limits.block_size
        self._num_rows = limits.num_rows
        self._step = step
        self._kv = kv
        self.rows = RowStore(device, limits, step.model.vocab_size)
        self.buffers: Sequence[Buffer] = (self.rows.buffer, kv.buffer)
        self.mask_words = self.rows.masks.shape[1]
        self.ledger: Counter[str] = Counter()  # steps that missed a faster runner, by reason
        self.num_padding = 0
        self._slow_reason = slow_reason
        self._half: Half | None = None  # of the step whose second half comes next

    def fill(self, plan: Plan, out: IntArray) -> Filled:
        """Pack the plan."""
        return Filled(plan, fill(plan, out))

    @torch.inference_mode()
    def step(self, filled: Filled, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        """Run the plan whose packed form is in `packed_plan`; leave the sampled tokens at the head of `out`.

        The scores, if the plan has any, follow them.
        """
        self.forward(filled, packed_plan)
        self._finish(filled.plan, out)

    @torch.inference_mode()
    def forward(self, filled: Filled, packed_plan: torch.Tensor) -> None:
        """The first half of a step, up to the logits."""
        if self._slow_reason is not None:
            self.ledger[self._slow_reason] += 1
        plan = filled.plan
        packed = unpack(packed_plan, Sections.of(plan))
        self.rows.apply(packed)
        if len(plan.block_copies):
            self._kv.copy_blocks(packed.block_copies)
        inputs = self._inputs(plan, packed)
        places = inputs.positions[packed.sample_tokens.long()] + 1
        sampled = SampledRows(packed.sample_rows.long(), places, self.rows.state)
        self._half = Half(packed, sampled, self._step.predict(inputs))

    @torch.inference_mode()
    def sample(self, filled: Filled, packed_plan: torch.Tensor, steering: Steering, out: torch.Tensor) -> None:
        """The second half: new masks to the rows, tokens and scores to `out`, and the rows move on."""
        self.rows.take_masks(steering)
        self._finish(filled.plan, out, steering.calls)

    def _finish(self, plan: Plan, out: torch.Tensor, calls: Sequence[Call] = ()) -> None:
        half, self._half = self._half, None
        assert half is not None, "nothing was computed to sample from"
        packed = half.packed
        logits = processed(half.found.logits, calls)
        found = self._step.sample(half.found, half.sampled, plan.needs, logits)
        if plan.needs & PROCESSED_SCORES:
            source = found.logits if logits is None else logits
            found = replace(found, logits=judged(found.logits, source, half.sampled, plan.needs))
        self.rows.advance(packed, found.tokens, plan.needs)
        out[: plan.num_samples] = found.tokens
        if plan.num_scores:
            self._write_scores(plan, packed, found, out[plan.num_samples : plan.num_results])

    def _inputs(self, plan: Plan, packed: Packed) -> Inputs:
        """Decodes take their token from the rows, chunks from the host."""
        rows = packed.decode_rows.long()
        token_ids, positions, token_rows = self.rows.last_token[rows], self.rows.length[rows], rows
        if len(packed.chunk_tokens):
            token_ids = torch.cat((token_ids, packed.chunk_tokens))
            positions = torch.cat((positions, packed.chunk_positions))
            token_rows = torch.cat((rows, packed.chunk_token_rows))
        return Inputs(
            token_ids=token_ids,
            positions=positions,
            batch=self._batch(plan, packed, positions, token_rows),
            sample_tokens=packed.sample_tokens.long(),
        )

    def _batch(self, plan: Plan, packed: Packed, positions: torch.Tensor, token_rows: torch.Tensor) -> AttentionBatch:
        index, offset = positions // self._block_size, positions % self._block_size
        tables = self.rows.tables
        return AttentionBatch(
            slots=tuple(table[token_rows, index] * self._block_size + offset for table in tables),
            tables=tables,
            decode_rows=token_rows[: plan.num_decodes],
            decode_lengths=positions[: plan.num_decodes] + 1,
            max_decode_length=plan.max_decode_length,
            num_chunk_tokens=len(packed.chunk_tokens),
            chunk_rows=packed.chunk_rows,
            chunk_offsets=packed.chunk_offsets,
            chunk_starts=packed.chunk_starts,
            chunk_ends=packed.chunk_ends,
            chunks=spans(plan),
        )

    def _write_scores(self, plan: Plan, packed: Packed, found: Outputs, out: torch.Tensor) -> None:
        """Of the samples that want them, then of the chunks' targets."""
        model, hidden = self._step.model, found.hidden
        targets = Targets(
            tokens=packed.score_targets.long(),
            places=packed.score_tokens.long(),
            logits_of=lambda places: model.logits(hidden[places]),
            slice_size=self._num_rows,
        )
        scored = packed.score_samples.long()
        write_scores(out, plan.num_top, found.logits[scored], found.tokens[scored], targets, self._step.score)


def spans(plan: Plan) -> tuple[Span, ...]:
    """Where the plan's chunks lie among the step's tokens."""
    offset = plan.num_decodes
    found = []
    for chunk in plan.chunks:
        found.append(Span(offset, chunk.start, len(chunk.tokens)))
        offset += len(chunk.tokens)
    return tuple(found)
