"""The executor in the checking mode: every plan passes the block ledger, and memory that is over holds poison.

Blocks that were freed become not-a-number on the compute stream, before the next step; a block is cleaned when it is
given to somebody. So a stale read spoils what is computed from it, and the step gives no token but a mark, which
`collect` turns into an error that names the row. Knows no device and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from gapless.core.limits import Limits
from gapless.core.plan import NO_SAMPLE, Plan
from gapless.core.request import IntArray, LongArray
from gapless.core.scheduler import Scheduler
from gapless.device.base import Buffer, Device
from gapless.device.checker import POISON
from gapless.errors import RaceError
from gapless.pipeline.block_ledger import BlockLedger, Touched
from gapless.pipeline.executor import Executor, FillMasks, LocalExecutor, StepRunner, Ticket
from gapless.runner.calls import Call
from gapless.runner.fill import Filled
from gapless.runner.kits.base import BlockMemory
from gapless.runner.steering import Steering

FP8, FP8_NAN = torch.float8_e4m3fn, 0x7F
SPOILED = -2  # in place of a token: the row read KV that is not a number
TOKENS_END = 2**30  # no vocabulary is larger

MakeExecutor = Callable[[Device, StepRunner, Limits, int], Executor]


class PoisoningRunner:
    """A runner whose steps begin by poisoning freed blocks and cleaning new ones."""

    def __init__(self, inner: StepRunner, memory: BlockMemory) -> None:
        self.buffers: Sequence[Buffer] = inner.buffers
        self.mask_words = inner.mask_words
        self._inner = inner
        self._memory = memory
        self._touched: dict[int, Touched] = {}

    def expect(self, plan: Plan, touched: Touched) -> None:
        """The plan is about to be filled and queued."""
        self._touched[plan.step] = touched

    def fill(self, plan: Plan, out: IntArray) -> Filled:
        return self._inner.fill(plan, out)

    @torch.inference_mode()
    def step(self, filled: Filled, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        self._begin(filled.plan)
        self._inner.step(filled, packed_plan, out)
        self._end(filled.plan, out)

    @torch.inference_mode()
    def forward(self, filled: Filled, packed_plan: torch.Tensor) -> None:
        self._begin(filled.plan)
        self._inner.forward(filled, packed_plan)

    @torch.inference_mode()
    def sample(self, filled: Filled, packed_plan: torch.Tensor, new: Steering, out: torch.Tensor) -> None:
        self._inner.sample(filled, packed_plan, new, out)
        self._end(filled.plan, out)

    def _begin(self, plan: Plan) -> None:
        touched = self._touched[plan.step]
        self._overwrite(touched.freed, poison_of(self._memory.places[0].dtype))
        self._overwrite(touched.fresh, 0)

    def _end(self, plan: Plan, out: torch.Tensor) -> None:
        self._mark_spoiled(self._touched.pop(plan.step).sample_blocks[self._memory.last_group], out)

    def _overwrite(self, blocks: LongArray, value: float) -> None:
        if len(blocks):
            index = self._on_device(blocks)
            for place in self._memory.places:
                if place.dtype == FP8:  # torch cannot fill it so
                    place.view(torch.uint8).index_fill_(0, index, FP8_NAN if value else 0)
                else:
                    place.index_fill_(0, index, value)

    def _mark_spoiled(self, blocks: LongArray, out: torch.Tensor) -> None:
        """Spoiled input spoils every later layer, so the last layer's keys and values show it.

        A sampled row's last block was clean when the row got it, and nobody else writes there.
        """
        last = self._memory.places[self._memory.last_place]
        if len(blocks) == 0 or not last.is_floating_point():
            return
        spoiled = last[self._on_device(blocks)].isnan().flatten(1).any(dim=1)
        out[: len(blocks)].masked_fill_(spoiled, SPOILED)

    def _on_device(self, numbers: LongArray) -> torch.Tensor:
        tensor, device = torch.from_numpy(np.ascontiguousarray(numbers)), self._memory.places[0].device
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class CheckedExecutor:
    """An executor whose plans, blocks and tokens are checked on the way."""

    def __init__(
        self,
        device: Device,
        runner: StepRunner,
        limits: Limits,
        num_slots: int,
        scheduler: Scheduler,
        memory: BlockMemory,
        make: MakeExecutor = LocalExecutor,
    ) -> None:
        self.ledger = BlockLedger(scheduler.limits)
        self._scheduler = scheduler
        self._runner = PoisoningRunner(runner, memory)
        self._inner = make(device, self._runner, limits, num_slots)

    def launch(self, plan: Plan) -> Ticket:
        touched = self.ledger.observe(plan, self._scheduler.rows, self._scheduler.pool.free)
        self._runner.expect(plan, touched)
        return self._inner.launch(plan)

    def complete(self, ticket: Ticket, fill_masks: FillMasks, calls: tuple[Call, ...] = ()) -> Ticket:
        return self._inner.complete(ticket, fill_masks, calls)

    def collect(self, ticket: Ticket) -> IntArray:
        results = self._inner.collect(ticket)
        self._check_tokens(ticket.plan, results[: ticket.plan.num_samples])
        return results

    def close(self) -> None:
        self._inner.close()

    def _check_tokens(self, plan: Plan, tokens: IntArray) -> None:
        """Those of overruns count for nothing: a failed step may have left them without KV."""
        live = self._scheduler.rows.epoch[plan.sample_rows] == plan.sample_epochs
        wrong = np.flatnonzero(live & (tokens != NO_SAMPLE) & ((tokens < 0) | (tokens >= TOKENS_END)))
        for index in wrong.tolist():
            row = int(plan.sample_rows[index])
            request = self._scheduler.rows.request[row]
            name = request.id if request is not None else None
            what = "read KV that is not a number" if tokens[index] == SPOILED else f"gave {tokens[index]} for a token"
            raise RaceError(f"step {plan.step}: row {row} (request {name!r}) {what}")


def poison_of(dtype: torch.dtype) -> float:
    """The value that freed memory of this kind holds."""
    return float("nan") if dtype.is_floating_point else POISON
