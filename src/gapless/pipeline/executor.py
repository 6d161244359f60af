"""Puts a plan on the device and brings its results back: `launch`, `collect`, `close`.

`launch` only queues: three streams, ordered by the slot's events. `collect` waits for one event, the oldest step's
`d2h_over`; it is the only wait in the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gapless.core.limits import Limits
from gapless.core.plan import Plan
from gapless.core.request import IntArray
from gapless.device.base import COMPUTE, D2H, H2D, STREAMS, Buffer, Device
from gapless.errors import GaplessError, StepFailed
from gapless.pipeline.slot import Slot, make_slot
from gapless.runner.fill import Filled, capacity, result_capacity
from gapless.trace.columns import COLLECT, FILL, LAUNCH
from gapless.trace.null_recorder import UNRECORDED
from gapless.trace.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Ticket:
    """A launched step."""

    plan: Plan
    slot: Slot | None  # None where an executor needs none
    error: Exception | None = None  # raised while the step was queued, on devices that run it then


class Executor(Protocol):
    """Runs the loop's plans."""

    def launch(self, plan: Plan) -> Ticket:
        """Queue the plan without waiting."""

    def collect(self, ticket: Ticket) -> IntArray:
        """Wait for the step; its tokens, in the order of `plan.sample_rows`, then its scores. Raises StepFailed."""

    def close(self) -> None:
        """Let everything queued end, and stop."""


class StepRunner(Protocol):
    """Runs one step of a plan that it packed itself."""

    buffers: Sequence[Buffer]

    def fill(self, plan: Plan, out: IntArray) -> Filled:
        """Pack the plan into the host's side of a slot. Where its size is 0 there is nothing to copy."""

    def step(self, filled: Filled, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        """Run one step on the compute stream; leave the plan's `num_results` numbers at the head of `out`.

        packed_plan: what `fill` packed, on the device.
        """


class LocalExecutor:
    """Runs plans on one device of this process."""

    def __init__(
        self, device: Device, runner: StepRunner, limits: Limits, num_slots: int, recorder: Recorder = UNRECORDED
    ) -> None:
        self._device = device
        self._h2d_stream, self._compute_stream, self._d2h_stream = map(device.stream, STREAMS)
        self._recorder = recorder
        self._runner = runner
        sizes = capacity(limits), result_capacity(limits)
        self._free = deque(make_slot(device, i, *sizes, timed=recorder.is_timed) for i in range(num_slots))

    def launch(self, plan: Plan) -> Ticket:
        slot = self._free.popleft()
        self._recorder.mark(FILL)
        filled = self._fill(plan, slot)
        self._recorder.mark(LAUNCH)
        self._copy_in(filled, slot)
        failure = self._compute(filled, slot)
        self._copy_out(plan, slot)
        self._recorder.launched(plan.step, plan.num_samples, plan.num_tokens, len(plan.new_blocks))
        return Ticket(plan, slot, failure)

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

    def _compute(self, filled: Filled, slot: Slot) -> Exception | None:
        """Queue the model's part; returns what it raised, on devices that run it at once."""
        runner, size, failure = self._runner, filled.size, None

        def step() -> None:
            runner.step(filled, slot.device_in.tensor[:size], slot.device_out.tensor)

        compute, label = self._compute_stream, f"compute {filled.plan.step}"
        reads = (slot.device_in,) if size else ()
        try:
            timed = slot.timer.around(COMPUTE, step)
            compute.run(timed, label, reads=reads, writes=(slot.device_out, *runner.buffers))
        except GaplessError:
            raise
        except Exception as error:
            failure = error
        compute.record(slot.compute_over)
        return failure

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
