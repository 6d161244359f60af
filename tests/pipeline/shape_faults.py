"""One thing wrong where a step is filled up to the shape of a captured graph, or replayed from one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from fault import GRAPHS, Table

from gapless.core.block_tables import NO_BLOCKS
from gapless.core.plan import NO_SEATS, NOTHING, Plan
from gapless.core.request import IntArray
from gapless.runner import graphs
from gapless.runner.fill import Filled, Shape
from gapless.runner.graphs import GraphRunner

FAULTS = fault = Table(GRAPHS)


@fault("padding decodes rows that others have", GraphRunner, "fill")
def _(original):
    def fill(self: GraphRunner, plan: Plan, out: IntArray) -> Filled:
        filled = original(self, plan, out)
        shape = filled.shape
        if shape is not None and not shape.num_chunks:
            others = np.setdiff1d(np.arange(self._limits.num_rows), plan.decode_rows)
            out[plan.num_decodes : shape.num_decodes] = others[: shape.num_decodes - plan.num_decodes]
        return filled

    return fill


@fault("a replay gets the new blocks of the step before", GraphRunner, "fill")
def _(original):
    def fill(self: GraphRunner, plan: Plan, out: IntArray) -> Filled:
        filled = original(self, plan, out)
        shape = filled.shape
        if shape is not None and not shape.num_chunks:
            blocks = out[shape.num_decodes : 2 * shape.num_decodes].copy()
            late = getattr(self, "late", {})
            self.late = dict(zip(plan.decode_rows.tolist(), blocks.tolist(), strict=False))
            for index, row in enumerate(plan.decode_rows.tolist()):
                out[shape.num_decodes + index] = late.get(row, graphs.NO_BLOCK)
        return filled

    return fill


@fault("a chunk's sample is read from a padding row's place", Shape, "chunk_samples")
def _(original):
    return lambda self, plan: slice(plan.num_decodes, plan.num_samples)


@fault("chunks that give no sample come first in a padded step", graphs, "pad")
def _(original):
    def pad(plan: Plan, shape: Shape, padding_row: int) -> Plan:
        padded = original(plan, shape, padding_row)
        count = len(plan.chunks)
        chunks = (*padded.chunks[:count][::-1], *padded.chunks[count:])
        rows = padded.sample_rows.copy()
        rows[shape.num_decodes : shape.num_decodes + count] = rows[shape.num_decodes : shape.num_decodes + count][::-1]
        return replace(padded, chunks=chunks, sample_rows=rows)

    return pad


@fault("a padded step's tokens belong to a row that somebody has", graphs, "pad")
def _(original):
    return lambda plan, shape, padding_row: original(plan, shape, 0)


@fault("a graph too small is replayed", GraphRunner, "_shape")
def _(original):
    def shape(self: GraphRunner, plan: Plan) -> Shape | None:
        found = original(self, plan)
        smaller = [other for other in self._decode_shapes if other.num_decodes < plan.num_decodes]
        return found if found is None or found.num_chunks or not smaller else smaller[-1]

    return shape


@fault("a greedy graph is replayed although a row draws", GraphRunner, "_replay")
def _(original):
    return lambda self, plan, *rest: original(self, replace(plan, needs=0), *rest)


@fault("new owners and blocks of a mixed replay are left out", GraphRunner, "_replay")
def _(original):
    def replay(self: GraphRunner, plan: Plan, shape: Shape, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        if shape.num_chunks:
            plan = replace(plan, seat_rows=NOTHING, seats=NO_SEATS, new_blocks=NO_BLOCKS)
        original(self, plan, shape, packed_plan, out)

    return replay


@fault("a step that wants log-probabilities is replayed", GraphRunner, "_shape")
def _(original):
    def shape(self: GraphRunner, plan: Plan) -> Shape | None:
        chunks = tuple(replace(chunk, targets=NOTHING) for chunk in plan.chunks)
        return original(self, replace(plan, chunks=chunks, score_samples=NOTHING))

    return shape


@fault("a replay reads the packed plan of the replay before", GraphRunner, "step")
def _(original):
    def step(self: GraphRunner, filled: Filled, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        late = getattr(self, "late", packed_plan)
        self.late = packed_plan.clone()
        is_decode = filled.shape is not None and not filled.shape.num_chunks
        original(self, filled, late if is_decode else packed_plan, out)

    return step
