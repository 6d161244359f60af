"""A plan filled up to fixed sizes, so that steps of many shapes can share one captured graph.

What is added belongs to the padding row, which nobody owns: decode rows that feed its token, one chunk of its tokens,
chunks of nothing. Everything the runner does with a plan it can do with a padded one; only the place of the results
differs, and `Shape` says where they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gapless.core.plan import Chunk, Plan
from gapless.runner.fill import Sections


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a step."""

    num_decodes: int
    num_chunk_tokens: int
    num_chunks: int

    @property
    def num_samples(self) -> int:
        return self.num_decodes + self.num_chunks

    def chunk_samples(self, plan: Plan) -> slice:
        """Where the samples of the plan's chunks lie among those of the padded plan; its decode rows' come first."""
        return slice(self.num_decodes, self.num_decodes + plan.num_samples - plan.num_decodes)

    def sections(self, plan: Plan) -> Sections:
        """Sizes of the padded plan's packed form, without padding it."""
        return Sections(
            num_decodes=self.num_decodes,
            num_chunk_tokens=self.num_chunk_tokens,
            num_chunks=self.num_chunks,
            num_samples=self.num_samples,
            num_score_samples=0,
            num_targets=0,
            num_new_blocks=len(plan.new_blocks),
            num_seats=len(plan.seats),
        )

    def holds(self, plan: Plan) -> bool:
        """Whether the plan can be padded to this; one chunk is kept for the padding's own tokens."""
        num_chunk_tokens = plan.num_tokens - plan.num_decodes
        return (
            plan.num_decodes <= self.num_decodes
            and num_chunk_tokens <= self.num_chunk_tokens
            and len(plan.chunks) < self.num_chunks
        )


def pad(plan: Plan, shape: Shape, padding_row: int) -> Plan:
    """The plan in this shape. Its samples: decode rows, padding, chunks that sample, then what nobody reads."""
    decode_rows = np.full(shape.num_decodes, padding_row, np.int32)
    decode_rows[: plan.num_decodes] = plan.decode_rows
    chunks = sorted(plan.chunks, key=lambda chunk: not chunk.samples)
    missing = shape.num_chunk_tokens - (plan.num_tokens - plan.num_decodes)
    chunks.append(Chunk(padding_row, 0, 0, np.zeros(missing, np.int32), samples=False))
    nothing = Chunk(padding_row, 0, 0, np.empty(0, np.int32), samples=False)
    chunks += [nothing] * (shape.num_chunks - len(chunks))
    sampled = [chunk.row if chunk.samples else padding_row for chunk in chunks]
    return replace(
        plan,
        decode_rows=decode_rows,
        chunks=tuple(replace(chunk, samples=True) for chunk in chunks),
        sample_rows=np.concatenate((decode_rows, np.array(sampled, np.int32))),
    )
