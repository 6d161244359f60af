"""One batch on one device: from a packed plan to sampled tokens.

Owns the rows and the KV cache. Runs on the compute stream; never waits, never looks at a value on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch

from gapless.attention.base import Attend, Attention, AttentionBatch, Span
from gapless.core.limits import Limits
from gapless.core.plan import Plan, score_width
from gapless.core.request import IntArray
from gapless.device.base import Buffer, Device
from gapless.runner.fill import Packed, Sections, fill, unpack
from gapless.runner.kv_store import KVStore
from gapless.runner.logprobs import score, score_in_slices
from gapless.runner.row_store import RowStore
from gapless.runner.sampler import sample


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states [n, hidden_size]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [m, vocab_size]."""


class Sampler(Protocol):
    """What the runner needs of a sampler."""

    def __call__(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        places: torch.Tensor,
        store: RowStore,
        *,
        random: bool,
        filtered: bool,
        min_tokens: bool,
    ) -> torch.Tensor:
        """Tokens [n] int64 for logits [n, vocab]; `places` [n] is the position that each token will have.

        The flags say what any of the rows needs; a row that does not need it is not changed by it.
        """


class Runner:
    """Runs steps. Everything that lasts from step to step is in its buffers."""

    def __init__(
        self,
        device: Device,
        limits: Limits,
        model: Model,
        kv: KVStore,
        attention: Attention,
        sampler: Sampler = sample,
        slow_reason: str | None = None,
    ) -> None:
        """slow_reason: why this runs although a faster runner was wanted."""
        self._block_size = limits.block_size
        self._num_rows = limits.num_rows
        self._model = model
        self._attention = attention
        self.sampler = sampler
        self.rows = RowStore(device, limits)
        self.buffers: Sequence[Buffer] = (self.rows.buffer, kv.buffer)
        self.ledger: Counter[str] = Counter()  # steps that missed a faster runner, by reason
        self._slow_reason = slow_reason

    def fill(self, plan: Plan, out: IntArray) -> int:
        """Pack the plan; return how many numbers it took."""
        return fill(plan, out)

    @torch.inference_mode()
    def step(self, plan: Plan, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        """Run the plan whose packed form is in `packed_plan`; leave the sampled tokens at the head of `out`.

        The scores, if the plan has any, follow them.
        """
        if self._slow_reason is not None:
            self.ledger[f"no native call: {self._slow_reason}"] += 1
        packed = unpack(packed_plan, Sections.of(plan))
        self.rows.apply(packed)
        hidden, positions = self.forward(plan, packed)
        logits = self._logits(plan, packed, hidden)
        # a copy, for a sampler may write on the logits
        raw = logits[packed.score_samples.long()] if len(plan.score_samples) else logits[:0]
        tokens = self._sample(plan, packed, logits, positions)
        self.rows.advance(packed, tokens)
        out[: plan.num_samples] = tokens
        if plan.num_scores:
            self._score(plan, packed, hidden, raw, tokens, out[plan.num_samples : plan.num_results])

    def forward(self, plan: Plan, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and positions of the step's tokens."""
        token_ids, positions, token_rows = self._inputs(packed)
        attend = self._attention.begin(self._batch(plan, packed, positions, token_rows))
        return self._model.forward(token_ids, positions, attend), positions

    def _inputs(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, positions and rows of the step's tokens: decodes from the rows, chunks from the host."""
        rows = packed.decode_rows.long()
        decodes = (self.rows.last_token[rows], self.rows.length[rows], rows)
        if len(packed.chunk_tokens) == 0:
            return decodes
        chunks = (packed.chunk_tokens, packed.chunk_positions, packed.chunk_token_rows)
        ids, positions, token_rows = (torch.cat(pair) for pair in zip(decodes, chunks, strict=True))
        return ids, positions, token_rows

    def _batch(self, plan: Plan, packed: Packed, positions: torch.Tensor, token_rows: torch.Tensor) -> AttentionBatch:
        blocks = self.rows.blocks
        slots = blocks[token_rows, positions // self._block_size] * self._block_size + positions % self._block_size
        return AttentionBatch(
            slots=slots,
            blocks=blocks,
            decode_rows=token_rows[: plan.num_decodes],
            decode_lengths=positions[: plan.num_decodes] + 1,
            max_decode_length=plan.max_decode_length,
            chunk_rows=packed.chunk_rows,
            chunk_offsets=packed.chunk_offsets,
            chunk_starts=packed.chunk_starts,
            chunk_ends=packed.chunk_ends,
            chunks=spans(plan),
        )

    def _logits(self, plan: Plan, packed: Packed, hidden: torch.Tensor) -> torch.Tensor:
        """What the samples are drawn from [num_samples, vocab_size]."""
        return self._model.logits(hidden[packed.sample_tokens.long()]) if plan.num_samples else hidden[:0]

    def _sample(self, plan: Plan, packed: Packed, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if plan.num_samples == 0:
            return torch.empty(0, dtype=torch.int64, device=logits.device)
        return self.sampler(
            logits,
            packed.sample_rows.long(),
            positions[packed.sample_tokens.long()] + 1,
            self.rows,
            random=plan.any_random,
            filtered=plan.any_filtered,
            min_tokens=plan.any_min_tokens,
        )

    def _score(
        self,
        plan: Plan,
        packed: Packed,
        hidden: torch.Tensor,
        raw: torch.Tensor,
        tokens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the scores: of the samples that want them, whose logits are `raw`, then of the chunks' targets."""
        scores = out.view(-1, score_width(plan.num_top))
        if len(raw):
            scores[: len(raw)] = score(raw, tokens[packed.score_samples.long()].clamp(min=0), plan.num_top)
        targets = scores[len(raw) :]
        places = hidden, packed.score_tokens.long()
        score_in_slices(self._model.logits, *places, packed.score_targets.long(), targets, self._num_rows)


def spans(plan: Plan) -> tuple[Span, ...]:
    """Where the plan's chunks lie among the step's tokens."""
    offset = plan.num_decodes
    found = []
    for chunk in plan.chunks:
        found.append(Span(offset, chunk.start, len(chunk.tokens)))
        offset += len(chunk.tokens)
    return tuple(found)
