"""Puts a plan on the device and brings its results back: `launch`, `complete`, `collect`, `close`.

`launch` only queues: three streams, ordered by the slot's events. A split step is launched open: of its compute only
the model's half. `complete` queues the other half, which samples, once the masks are filled; meanwhile the model runs.
`collect` waits for one event, the oldest step's `d2h_over`; it is the only wait in the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gapless.core.limits import Limits
from gapless.core.plan import Plan
from gapless.core.request import IntArray, LongArray
from gapless.device.base import COMPUTE, D2H, H2D, SAMPLING, STREAMS, Buffer, Device
from gapless.errors import GaplessError, StepFailed
from gapless.pipeline.slot import Slot, make_slot
from gapless.runner.calls import Call
from gapless.runner.fill import Filled, capacity, result_capacity
from gapless.runner.steering import Steering, device_views, host_views, mask_capacity, packed_size
from gapless.trace.columns import COLLECT, FILL, LAUNCH, MASKS
from gapless.trace.null_recorder import UNRECORDED
from gapless.trace.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Ticket:
    """A launched step."""

    plan: Plan
    slot: Slot | None  # None where an executor needs none
    error: Exception | None = None  # raised while the step was queued, on devices that run it then
    open_half: Filled | None = None  # of a step that is not complete: what its second half must know
    calls: tuple[Call, ...] = ()  # that its second half makes


class Executor(Protocol):
    """Runs the loop's plans."""

    def launch(self, plan: Plan) -> Ticket:
        """Queue the plan without waiting; of a split step the first half."""

    def complete(self, ticket: Ticket, fill_masks: FillMasks, calls: tuple[Call, ...] = ()) -> Ticket:
        """Queue the second half of a split step, behind the masks that are filled now and the calls."""

    def collect(self, ticket: Ticket) -> IntArray:
        """Wait for the step; its tokens, in the order of `plan.sample_rows`, then its scores. Raises StepFailed."""

    def close(self) -> None:
        """Let everything queued end, and stop."""


# (the plan, rows [n], masks [n, mask_words]) -> how many of them were written
FillMasks = Callable[[Plan, LongArray, IntArray], int]


class StepRunner(Protocol):
    """Runs one step of a plan that it packed itself."""

    buffers: Sequence[Buffer]
    mask_words: int  # of a row's mask

    def fill(self, plan: Plan, out: IntArray) -> Filled:
        """Pack the plan into the host's side of a slot. Where its size is 0 there is nothing to copy."""

    def step(self, filled: Filled, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        """Run one step on the compute stream; leave the plan's `num_results` numbers at the head of `out`.

        packed_plan: what `fill` packed, on the device.
        """

    def forward(self, filled: Filled, packed_plan: torch.Tensor) -> None:
        """The first half of `step`: everything up to the logits. `sample` comes next on the compute stream."""

    def sample(self, filled: Filled, packed_plan: torch.Tensor, new: Steering, out: torch.Tensor) -> None:
        """The second half: new masks, calls of processors, tokens."""


class LocalExecutor:
    """Runs plans on one device of this process."""

    def __init__(
        self, device: Device, runner: StepRunner, limits: Limits, num_slots: int, recorder: Recorder = UNRECORDED
    ) -> None:
        self._device = device
        self._h2d_stream, self._compute_stream, self._d2h_stream = map(device.stream, STREAMS)
        self._recorder = recorder
        self._runner = runner
        self._num_rows = limits.num_rows
        sizes = capacity(limits), result_capacity(limits), mask_capacity(limits.num_rows, runner.mask_words)
        self._free = deque(make_slot(device, i, *sizes, timed=recorder.is_timed) for i in range(num_slots))

    def launch(self, plan: Plan) -> Ticket:
        slot = self._free.popleft()
        self._recorder.mark(FILL)
        filled = self._fill(plan, slot)
        self._recorder.mark(LAUNCH)
        self._copy_in(filled, slot)
        if plan.is_split:
            ticket = Ticket(plan, slot, self._forward(filled, slot), filled)
        else:
            ticket = Ticket(plan, slot, self._step(filled, slot))
            self._copy_out(plan, slot)
        self._recorder.launched(plan.step, plan.num_samples, plan.num_tokens, len(plan.new_blocks) * plan.num_groups)
        return ticket

    def complete(self, ticket: Ticket, fill_masks: FillMasks, calls: tuple[Call, ...] = ()) -> Ticket:
        plan, slot, filled = ticket.plan, ticket.slot, ticket.open_half
        assert slot is not None
        assert filled is not None, f"step {plan.step} is complete"
        self._recorder.mark(MASKS)
        self._device.touch(f"masks {plan.step}", writes=(slot.host_masks,))
        count = fill_masks(plan, *host_views(slot.host_masks.array, self._num_rows))
        self._recorder.mark(LAUNCH)
        self._copy_masks(plan, slot, count)
        failure = self._sample(filled, slot, count, calls)
        self._copy_out(plan, slot)
        return Ticket(plan, slot, ticket.error or failure, calls=calls)

    def _fill(self, plan: Plan, slot: Slot) -> Filled:
        self._device.touch(f"fill {plan.step}", writes=(slot.host_in,))
        return self._runner.fill(plan, slot.host_in.array)

    def _copy_in(self, filled: Filled, slot: Slot) -> None:
        size = filled.size
        if size == 0:
            return

        def copy() -> None:
            slot.device_in.tensor[:size].copy_(slot.host_in.tensor[:size], non_blocking=True)

        h2d, label = self._h2d_stream, f"copy in {filled.plan.step}"
        h2d.run(slot.timer.around(H2D, copy), label, reads=(slot.host_in,), writes=(slot.device_in,))
        h2d.record(slot.h2d_over)
        self._compute_stream.wait(slot.h2d_over)

    def _copy_masks(self, plan: Plan, slot: Slot, count: int) -> None:
        size = packed_size(count, self._num_rows, self._runner.mask_words)
        if size == 0:
            return

        def copy() -> None:
            slot.device_masks.tensor[:size].copy_(slot.host_masks.tensor[:size], non_blocking=True)

        h2d, label = self._h2d_stream, f"copy masks {plan.step}"
        h2d.run(copy, label, reads=(slot.host_masks,), writes=(slot.device_masks,))
        h2d.record(slot.masks_over)
        self._compute_stream.wait(slot.masks_over)

    def _step(self, filled: Filled, slot: Slot) -> Exception | None:
        runner, size = self._runner, filled.size

        def step() -> None:
            runner.step(filled, slot.device_in.tensor[:size], slot.device_out.tensor)

        reads = (slot.device_in,) if size else ()
        failure = self._compute(COMPUTE, step, f"compute {filled.plan.step}", slot, reads, (slot.device_out,))
        self._compute_stream.record(slot.compute_over)
        return failure

    def _forward(self, filled: Filled, slot: Slot) -> Exception | None:
        runner, size = self._runner, filled.size

        def forward() -> None:
            runner.forward(filled, slot.device_in.tensor[:size])

        reads = (slot.device_in,) if size else ()
        return self._compute(COMPUTE, forward, f"compute {filled.plan.step}", slot, reads, ())

    def _sample(self, filled: Filled, slot: Slot, count: int, calls: tuple[Call, ...]) -> Exception | None:
        runner, size, num_rows = self._runner, filled.size, self._num_rows

        def sample() -> None:
            steering = device_views(slot.device_masks.tensor, num_rows, count, calls)
            runner.sample(filled, slot.device_in.tensor[:size], steering, slot.device_out.tensor)

        reads = ((slot.device_in,) if size else ()) + ((slot.device_masks,) if count else ())
        failure = self._compute(SAMPLING, sample, f"sample {filled.plan.step}", slot, reads, (slot.device_out,))
        self._compute_stream.record(slot.compute_over)
        return failure

    def _compute(
        self,
        part: int,
        work: Callable[[], None],
        label: str,
        slot: Slot,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
    ) -> Exception | None:
        """Queue work of the runner; returns what it raised, on devices that run it at once."""
        timed = slot.timer.around(part, work)
        try:
            self._compute_stream.run(timed, label, reads=reads, writes=(*writes, *self._runner.buffers))
        except GaplessError:
            raise
        except Exception as error:
            return error
        return None

    def _copy_out(self, plan: Plan, slot: Slot) -> None:
        count = plan.num_results

        def copy() -> None:
            slot.host_out.tensor[:count].copy_(slot.device_out.tensor[:count], non_blocking=True)

        d2h, label = self._d2h_stream, f"copy out {plan.step}"
        d2h.wait(slot.compute_over)
        d2h.run(slot.timer.around(D2H, copy), label, reads=(slot.device_out,), writes=(slot.host_out,))
        d2h.record(slot.d2h_over)

    def collect(self, ticket: Ticket) -> IntArray:
        slot = ticket.slot
        assert slot is not None
        assert ticket.open_half is None, f"step {ticket.plan.step} is not complete"
        self._recorder.mark(COLLECT)
        try:
            slot.d2h_over.synchronize()
            if ticket.error is not None:
                raise ticket.error
            self._device.touch(f"collect {ticket.plan.step}", reads=(slot.host_out,))
            results: IntArray = slot.host_out.array[: ticket.plan.num_results].copy()
        except GaplessError:
            raise
        except Exception as error:
            self._recorder.failed()
            raise StepFailed(f"step {ticket.plan.step} failed on the device: {error}") from error
        finally:
            self._recorder.collected(slot.timer.read())
            self._device.release(f"collect {ticket.plan.step}", slot.buffers)
            self._free.append(slot)
        return results

    def close(self) -> None:
        self._device.close()
