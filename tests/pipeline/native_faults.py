"""One thing wrong around the native call: what goes in, and what is done with what comes back."""

from __future__ import annotations

from dataclasses import replace

import torch
from fault import NATIVE, Table

import gapless.runner.step
from gapless.core.plan import NO_SEATS, NOTHING
from gapless.core.row_fields import need
from gapless.native import library
from gapless.runner import native_runner
from gapless.runner.fill import Filled, Packed
from gapless.runner.native_runner import NativeRunner
from gapless.runner.row_store import RowStore, seat_columns

FAULTS = fault = Table(NATIVE)


def without(filled: Filled, name: str) -> Filled:
    """The same, with a plan that does not need this field."""
    return replace(filled, plan=replace(filled.plan, needs=filled.plan.needs & ~need(name)))


@fault("a native step chooses the likeliest token although a row draws", NativeRunner, "step")
def _(original):
    return lambda self, filled, packed, out: original(self, without(filled, "temperature"), packed, out)


@fault("a native step knows no minimum lengths", NativeRunner, "step")
def _(original):
    return lambda self, filled, packed, out: original(self, without(filled, "min_total"), packed, out)


@fault("a new owner's sampling state comes after the native call", NativeRunner, "step")
def _(original):
    def step(self: NativeRunner, filled: Filled, packed: torch.Tensor, out: torch.Tensor) -> None:
        plan = filled.plan
        unseated = replace(plan, seat_rows=NOTHING, seats=NO_SEATS)
        original(self, replace(filled, plan=unseated), packed, out)
        late = getattr(self, "late", None)
        self.late = (plan, packed.clone()) if len(plan.seat_rows) else None
        if late is not None:
            self.rows.apply(native_runner.unpack(late[1], native_runner.Sections.of(late[0])))

    return step


@fault("a token drawn after the native call does not reach its row", NativeRunner, "_sample")
def _(original):
    def sample(self: NativeRunner, rows: torch.Tensor, needs: int) -> torch.Tensor:
        before = self.rows.last_token.clone()
        tokens = original(self, rows, needs)
        self.rows.last_token.copy_(before)
        return tokens

    return sample


@fault("a draw after the native call is that of the place before", NativeRunner, "_sample")
def _(original):
    def sample(self: NativeRunner, rows: torch.Tensor, needs: int) -> torch.Tensor:
        self.rows.length[rows] -= 1
        tokens = original(self, rows, needs)
        self.rows.length[rows] += 1
        return tokens

    return sample


@fault("the native call misses the last new block", library, "CSections")
def _(original):
    return lambda *counts: original(*counts[:-1], max(0, counts[-1] - 1))


@fault("the native call predicts from the token before", NativeRunner, "_predict")
def _(original):
    return lambda self, picked: original(self, (picked - 1).clamp(min=0))


@fault("log-probabilities are of the logits that the next slice left", gapless.runner.step, "score")
def _(original):
    return lambda logits, tokens, num_top: original(logits.flip(0), tokens, num_top)


@fault("the native step's rows forget their owner's stops", RowStore, "apply")
def _(original):
    def apply(self: RowStore, packed: Packed) -> None:
        original(self, packed)
        seat_columns(self.seats)["stop_ids"][packed.seat_rows.long()] = -1

    return apply
