"""One thing wrong where a step is filled up to the shape of a captured graph, or replayed from one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from fault import GRAPHS, Table

from gapless.core.plan import NO_SEATS, NOTHING, Plan
from gapless.core.request import IntArray
from gapless.runner import graphs, mixed
from gapless.runner.fill import Filled
from gapless.runner.graphs import GraphRunner
from gapless.runner.ladder import Shape

FAULTS = fault = Table(GRAPHS)


@fault("padding decodes rows that others have", GraphRunner, "fill")
def _(original):
    def fill(self: GraphRunner, plan: Plan, out: IntArray) -> Filled:
        filled = original(self, plan, out)
        shape = filled.shape
        if shape is not None and not shape.has_chunks:
            others = np.setdiff1d(np.arange(self._limits.num_rows), plan.decode_rows)
            out[plan.num_decodes : shape.num_rows] = others[: shape.num_rows - plan.num_decodes]
        return filled

    return fill


@fault("a replay gets the new blocks of the step before", GraphRunner, "fill")
def _(original):
    def fill(self: GraphRunner, plan: Plan, out: IntArray) -> Filled:
        filled = original(self, plan, out)
        shape = filled.shape
        if shape is not None and not shape.has_chunks:
            blocks = out[shape.num_rows : 2 * shape.num_rows].copy()
            late = getattr(self, "late", {})
            self.late = dict(zip(plan.decode_rows.tolist(), blocks.tolist(), strict=False))
            for index, row in enumerate(plan.decode_rows.tolist()):
                out[shape.num_rows + index] = late.get(row, graphs.NO_BLOCK)
        return filled

    return fill


def _with_chunks(change):
    """A mistake in the numbers of the chunks, as they are packed: row, offset, start, end and sample of each."""

    def mistaken(original):
        def chunk_words(plan: Plan) -> IntArray:
            found = original(plan)
            change(found, plan)
            return found

        return chunk_words

    return mistaken


@fault("the samples of a captured step's chunks are in the reverse order", mixed, "_chunk_words")
@_with_chunks
def _(words: IntArray, plan: Plan) -> None:
    samples = words[4, words[4] >= 0]
    words[4, words[4] >= 0] = samples[::-1]


@fault("a captured step's chunks begin a token early", mixed, "_chunk_words")
@_with_chunks
def _(words: IntArray, plan: Plan) -> None:
    words[2:4] = np.maximum(words[2:4] - 1, [[0], [1]])


@fault("a captured step feeds the tokens of the chunk before", mixed, "_chunk_words")
@_with_chunks
def _(words: IntArray, plan: Plan) -> None:
    words[:4] = np.roll(words[:4], 1, axis=1)


@fault("a captured step scores the samples in a different order", mixed, "score_places")
def _(original):
    return lambda plan, count: original(plan, count)[::-1]


@fault("a graph too small is replayed", GraphRunner, "_shape")
def _(original):
    def shape(self: GraphRunner, plan: Plan) -> Shape | None:
        found = original(self, plan)
        smaller = [other for other in self._decode_shapes if other.num_rows < plan.num_decodes]
        return found if found is None or found.has_chunks or not smaller else smaller[-1]

    return shape


@fault("a greedy graph is replayed although a row draws", graphs, "_is_plain")
def _(original):
    return lambda plan: original(replace(plan, needs=0))


@fault("new owners and blocks of a mixed replay are left out", graphs, "pack_mixed")
def _(original):
    nothing = {"seat_rows": NOTHING, "seats": NO_SEATS}
    return lambda plan, *rest: original(replace(plan, new_blocks=plan.new_blocks[:0], **nothing), *rest)


@fault("a prompt is scored a token late after a replay", mixed, "target_parts")
def _(original):
    def target_parts(plan: Plan) -> list[IntArray]:
        places, targets = original(plan)
        return [np.maximum(places - 1, 0), targets]

    return target_parts


@fault("a prompt's second slice is scored like its first", graphs, "in_slices")
def _(original):
    return lambda num_targets, slice_size: original(min(num_targets, slice_size), slice_size)


@fault("a replay reads the packed plan of the replay before", GraphRunner, "step")
def _(original):
    def step(self: GraphRunner, filled: Filled, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        late = getattr(self, "late", packed_plan)
        self.late = packed_plan.clone()
        is_decode = filled.shape is not None and not filled.shape.has_chunks
        original(self, filled, late if is_decode else packed_plan, out)

    return step
