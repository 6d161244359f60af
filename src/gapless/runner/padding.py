"""A plan filled up to fixed sizes, so that steps of many shapes can share one captured graph.

The padding belongs to a row that nobody owns: decode rows that feed its token, one chunk of its tokens,
chunks of nothing. Everything the runner does with a plan it can do with a padded one; only the place of the results
differs, and `Shape` says where they are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gapless.core.plan import Chunk, Plan
from gapless.runner.fill import Shape


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
