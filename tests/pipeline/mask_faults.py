"""One thing wrong with guides: what they hear, when their masks are filled, and to whom the masks go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from fault import GRAPHS, NATIVE, Fault, Table, wrapping

from gapless.core.facts import Facts
from gapless.core.outcome import Commit
from gapless.core.plan import NOTHING, Plan
from gapless.core.request import IntArray, LongArray, Request, RowTable, int_array
from gapless.core.scheduler import Scheduler
from gapless.errors import GaplessError
from gapless.pipeline.masks import Masks
from gapless.runner.fill import Filled
from gapless.runner.native_runner import NativeRunner
from gapless.runner.processors import SampledRows
from gapless.runner.row_store import RowStore
from gapless.runner.steering import Steering

FAULTS = fault = Table()


@fault("a guide hears of each token one step late", Masks, "_guided")
def _(original):
    return lambda masks, plan: [
        (request, max(known - 1, request.num_prompt)) for request, known in original(masks, plan)
    ]


@fault("masks are filled before the step before is settled", RowTable, "masks_due")
def _(original):
    return lambda self, rows: (original(self, rows)[0], False)


@fault("the first token of a request comes without its mask", RowTable, "masks_due")
def _(original):
    def masks_due(self: RowTable, rows: LongArray) -> tuple[IntArray, bool]:
        due, waits = original(self, rows)
        return due[self.pending[rows[due]] + self.num_tokens[rows[due]] > self.prompts[rows[due]] + 1], waits

    RowTable.prompts = property(lambda self: np.array([r.num_prompt if r else 0 for r in self.request]))
    return masks_due


@fault("a guide is told again what it knew before a preemption", RowTable, "seat")
def _(original):
    def seat(self: RowTable, request: Request) -> int:
        request.num_guided = 0
        return original(self, request)

    return seat


@fault("a guide hears a token of a step that does not count", Scheduler, "commit")
def _(original):
    def commit(self: Scheduler, plan: Plan, results: IntArray):
        gone = self.rows.epoch[plan.sample_rows] != plan.sample_epochs
        for index in np.flatnonzero(gone).tolist():
            for request in self._waiting.values():  # it was preempted
                if request.guide is not None and request.guide.waits:
                    request.guide.advance(int_array(results[index : index + 1]))
        return original(self, plan, results)

    return commit


@fault("a mask that never changes is not sent to a second row", RowTable, "seat")
def _(original):
    def seat(self: RowTable, request: Request) -> int:
        row = original(self, request)
        self.guided[row] &= self.waits[row] or request.num_preemptions == 0
        return row

    return seat


@fault("a mask that changes is sent once", RowTable, "masks_due")
def _(original):
    def masks_due(self: RowTable, rows: LongArray) -> tuple[IntArray, bool]:
        found = original(self, rows)
        self.guided[rows] = False
        return found

    return masks_due


@fault("masks go to the rows beside theirs", RowStore, "take_masks")
def _(original):
    return lambda self, new: original(self, Steering((new.rows + 1) % (len(self.masks) - 1), new.masks))


@fault("masks are exchanged between rows", RowStore, "take_masks")
def _(original):
    return lambda self, new: original(self, Steering(new.rows, new.masks.flip(0)))


@fault("masks reach their rows one step late", RowStore, "take_masks")
def _(original):
    def take_masks(self: RowStore, new: Steering) -> None:
        late, self.late = getattr(self, "late", None), Steering(new.rows.clone(), new.masks.clone())
        if late is not None:
            original(self, late)

    return take_masks


@fault("an unguided row obeys the mask of whoever had the row", SampledRows, "fields")
def _(original):
    def fields(self: SampledRows, needs: int):
        found = original(self, needs)
        return found | {"masked": torch.ones_like(found["masked"])}

    return fields


@fault("a plan is told of no mask beside a chunk", RowTable, "masks_due")
def _(original):
    def masks_due(self: RowTable, rows: LongArray) -> tuple[IntArray, bool]:
        due, waits = original(self, rows)
        return (due, waits) if (self.pending[rows] > 1).all() else (NOTHING, False)

    return masks_due


@fault("a guide that is over is not asked", Masks, "_end")
def _(original):
    def end(masks: Masks, request: Request, reason: str, error: GaplessError | None = None) -> None:
        if reason != "stop":
            original(masks, request, reason, error)

    return end


@fault("a token that must come counts again when its sample is back", Facts, "foresee")
def _(original):
    def foresee(self: Facts, runs: Mapping[int, Sequence[int]]) -> Commit:
        found, rows = original(self, runs), list(runs)
        self._rows.num_foreseen -= int(self._rows.foreseen[rows].sum())
        self._rows.foreseen[rows] = 0
        return found

    return foresee


@fault("tokens that must come go on behind a stop", Facts, "foresee")
def _(original):
    def foresee(self: Facts, runs: Mapping[int, Sequence[int]]) -> Commit:
        rows = list(runs)
        stop_ids, self._rows.stop_ids[rows] = self._rows.stop_ids[rows].copy(), -1
        found = original(self, runs)
        self._rows.stop_ids[rows] = stop_ids
        return found

    return foresee


@fault("tokens that must come are facts, and are not fed", Scheduler, "_foresee")
def _(original):
    def foresee(self: Scheduler, runs: Mapping[int, Sequence[int]]) -> Commit:
        found = original(self, runs)
        for row in runs:
            if self.rows.request[row] is not None:
                self.rows.decoding[row] = True
                self._prefilling.remove(row)
        return found

    return foresee


@fault("a penalized row does not count tokens that must come", Request, "can_be_forced")
def _(original):
    return property(lambda self: not self.wants_scores)


@fault("the mask of a token that must come allows others", Masks, "_force")
def _(original):
    return lambda self, requests, runs, masks: original(self, requests, runs, masks.copy())


def _take_none(original):
    return lambda self, filled, packed, new, out: original(
        self, filled, packed, Steering(new.rows[:0], new.masks[:0]), out
    )


FAULTS.append(Fault("a native step takes no new masks", wrapping(NativeRunner, "sample", _take_none), stage=NATIVE))


def of_graphs() -> list[Fault]:
    """For a machine with Triton."""
    from gapless.runner.graphs import GraphRunner

    found = Table(GRAPHS)

    @found("the second half of a shape follows the first of another", GraphRunner, "sample")
    def _(original):
        def sample(self: GraphRunner, filled: Filled, packed, new, out) -> None:
            shape = filled.shape
            if shape is not None:
                kind = self._mixed_shapes if shape.has_chunks else self._decode_shapes
                filled = replace(filled, shape=kind[kind.index(shape) - 1])
            original(self, filled, packed, new, out)

        return sample

    found.append(Fault("a replay takes no new masks", wrapping(GraphRunner, "sample", _take_none), stage=GRAPHS))
    return found
