"""One thing wrong in what the device counts for penalties, or in what a new owner brings along."""

from __future__ import annotations

from dataclasses import replace

import stages
import torch
from fault import GRAPHS, Table

import gapless.core.baggage
import gapless.core.request
from gapless.core.baggage import NO_BAGGAGE, Owner
from gapless.core.request import RowTable
from gapless.core.row_fields import COUNTED
from gapless.core.scheduler import Scheduler
from gapless.runner.row_store import RowStore

FAULTS = fault = Table()
OF_GRAPHS = fault_of_graphs = Table(GRAPHS)


@fault("tokens are counted a step late", RowStore, "keep")
def _(original):
    late: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self: RowStore, rows: torch.Tensor, tokens: torch.Tensor, needs: int) -> None:
        original(self, rows, tokens, needs & ~COUNTED)
        if id(self) in late:
            before = self.last_token.clone()
            original(self, *late.pop(id(self)), COUNTED)
            self.last_token.copy_(before)
        if needs & COUNTED:
            late[id(self)] = rows.clone(), tokens.clone()

    return keep


@fault("tokens are counted only if the whole batch needs it", RowStore, "keep")
def _(original):
    return lambda self, rows, tokens, needs: original(self, rows, tokens, needs if len(rows) == 1 else 0)


@fault("a token is counted twice", RowStore, "keep")
def _(original):
    def keep(self: RowStore, rows: torch.Tensor, tokens: torch.Tensor, needs: int) -> None:
        original(self, rows, tokens, needs)
        original(self, rows, tokens, needs)

    return keep


@fault("a new owner keeps the counts of the last one", RowStore, "take_in")
def _(original):
    return lambda self, count_rows, counts, biases: original(self, count_rows[:0], counts, biases)


@fault("a new owner keeps the biases of the last one", RowStore, "take_in")
def _(original):
    return lambda self, count_rows, counts, biases: original(self, count_rows, counts, biases[:0])


@fault("a preempted request forgets what it had generated", gapless.core.request, "pack_baggage")
def _(original):
    def pack(owners: list[Owner]):
        return original([replace(owner, tokens=owner.tokens[: owner.num_prompt]) for owner in owners])

    return pack


@fault("tokens generated before a preemption count as the prompt's", gapless.core.request, "pack_baggage")
def _(original):
    return lambda owners: original([replace(owner, num_prompt=len(owner.tokens)) for owner in owners])


@fault("tokens of the prompt count as generated", gapless.core.request, "pack_baggage")
def _(original):
    return lambda owners: original([replace(owner, num_prompt=0) for owner in owners])


@fault("tokens found in the prefix cache are not counted", RowTable, "_owner")
def _(original):
    def owner(self: RowTable, row: int, needs: int) -> Owner:
        found, request = original(self, row, needs), self.request[row]
        assert request is not None
        cached = request.num_cached
        return replace(found, tokens=found.tokens[cached:], num_prompt=max(found.num_prompt - cached, 0))

    return owner


@fault("a plan with chunks of known tokens brings no baggage", Scheduler, "_promise")
def _(original):
    def promise(self: Scheduler, decodes, widths, chunks, seats):
        plan = original(self, decodes, widths, chunks, seats)
        return plan if len(decodes) == 0 else replace(plan, baggage=NO_BAGGAGE)

    return promise


@fault_of_graphs("a captured step counts no token", stages, "count")
def _(original):
    return lambda counts, rows, tokens: None


@fault_of_graphs("a captured step counts the token of the row before", stages, "count")
def _(original):
    return lambda counts, rows, tokens: original(counts, rows.roll(1), tokens)


@fault_of_graphs("a captured step takes in no baggage", stages, "read_mixed")
def _(original):
    def read(packed: torch.Tensor):
        plan = original(packed)
        return replace(plan, count_rows=plan.count_rows[:0], counts=plan.counts[:0])

    return read
