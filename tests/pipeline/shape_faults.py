"""One thing wrong where a step is filled up to the shape of a captured graph, or replayed from one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from fault import GRAPHS, Table

from gapless.core.plan import NOTHING, Plan
from gapless.core.request import IntArray
from gapless.core.scheduler import NO_BLOCKS
from gapless.runner import graphs
from gapless.runner.graphs import GraphRunner
from gapless.runner.padding import Shape

FAULTS = fault = Table(GRAPHS)


@fault("padding decodes rows that others have", GraphRunner, "fill")
def _(original):
    def fill(self: GraphRunner, plan: Plan, out: IntArray) -> int:
        size, shape = original(self, plan, out), self._shape(plan)
        if shape is not None and not shape.num_chunks:
            others = np.setdiff1d(np.arange(self._limits.num_rows), plan.decode_rows)
            out[plan.num_decodes : shape.num_decodes] = others[: shape.num_decodes - plan.num_decodes]
        return size

    return fill


@fault("a replay gets the new blocks of the step before", GraphRunner, "fill")
def _(original):
    def fill(self: GraphRunner, plan: Plan, out: IntArray) -> int:
        size, shape = original(self, plan, out), self._shape(plan)
        if shape is not None and not shape.num_chunks:
            blocks = out[shape.num_decodes : 2 * shape.num_decodes].copy()
            late = getattr(self, "late", {})
            self.late = dict(zip(plan.decode_rows.tolist(), blocks.tolist(), strict=False))
            for index, row in enumerate(plan.decode_rows.tolist()):
                out[shape.num_decodes + index] = late.get(row, graphs.NO_BLOCK)
        return size

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


@fault("a greedy graph is replayed although a row draws", graphs, "_is_greedy")
def _(original):
    return lambda plan: True


@fault("new owners and blocks of a mixed replay are left out", GraphRunner, "step")
def _(original):
    def step(self: GraphRunner, plan: Plan, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        shape = self._shape(plan)
        if shape is not None and shape.num_chunks:
            plan = replace(plan, seats=(), new_blocks=NO_BLOCKS)
        original(self, plan, packed_plan, out)

    return step


@fault("a step that wants log-probabilities is replayed", GraphRunner, "_shape")
def _(original):
    def shape(self: GraphRunner, plan: Plan) -> Shape | None:
        chunks = tuple(replace(chunk, targets=NOTHING) for chunk in plan.chunks)
        return original(self, replace(plan, chunks=chunks, score_samples=NOTHING))

    return shape


@fault("a replay reads the packed plan of the replay before", GraphRunner, "step")
def _(original):
    def step(self: GraphRunner, plan: Plan, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        late = getattr(self, "late", packed_plan)
        self.late = packed_plan.clone()
        shape = self._shape(plan)
        original(self, plan, late if shape is not None and not shape.num_chunks else packed_plan, out)

    return step
