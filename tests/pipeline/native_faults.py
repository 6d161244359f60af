"""One thing wrong around the native call: what goes in, and what is done with what comes back."""

from __future__ import annotations

from dataclasses import replace

import torch
from fault import NATIVE, Table

from gapless.core.plan import Plan
from gapless.native import library
from gapless.runner import native
from gapless.runner.native import NativeRunner
from gapless.runner.row_store import RowStore

FAULTS = fault = Table(NATIVE)


@fault("a native step chooses the likeliest token although a row draws", NativeRunner, "step")
def _(original):
    return lambda self, plan, packed, out: original(self, replace(plan, any_random=False), packed, out)


@fault("a native step knows no minimum lengths", NativeRunner, "step")
def _(original):
    return lambda self, plan, packed, out: original(self, replace(plan, any_min_tokens=False), packed, out)


@fault("a new owner's sampling state comes after the native call", NativeRunner, "step")
def _(original):
    def step(self: NativeRunner, plan: Plan, packed: torch.Tensor, out: torch.Tensor) -> None:
        original(self, replace(plan, seats=()), packed, out)
        late = getattr(self, "late", None)
        self.late = (plan, packed.clone()) if plan.seats else None
        if late is not None:
            self.rows.apply(native.unpack(late[1], native.Sections.of(late[0])))

    return step


@fault("a token drawn after the native call does not reach its row", NativeRunner, "_sample")
def _(original):
    def sample(self: NativeRunner, plan: Plan, rows: torch.Tensor) -> torch.Tensor:
        before = self.rows.last_token.clone()
        tokens = original(self, plan, rows)
        self.rows.last_token.copy_(before)
        return tokens

    return sample


@fault("a draw after the native call is that of the place before", NativeRunner, "_sample")
def _(original):
    def sample(self: NativeRunner, plan: Plan, rows: torch.Tensor) -> torch.Tensor:
        self.rows.length[rows] -= 1
        tokens = original(self, plan, rows)
        self.rows.length[rows] += 1
        return tokens

    return sample


@fault("the native call misses the last new block", library, "Sections")
def _(original):
    return lambda *counts: original(*counts[:-1], max(0, counts[-1] - 1))


@fault("the native call predicts from the token before", NativeRunner, "_predict")
def _(original):
    return lambda self, picked: original(self, (picked - 1).clamp(min=0))


@fault("log-probabilities are of the logits that the next slice left", native, "score")
def _(original):
    return lambda logits, tokens, num_top: original(logits.flip(0), tokens, num_top)


@fault("the native step's rows forget their owner's stops", RowStore, "_seat")
def _(original):
    def seat(self: RowStore, seats: torch.Tensor) -> None:
        original(self, seats)
        self.stop_ids[seats[:, 0].long()] = -1

    return seat
