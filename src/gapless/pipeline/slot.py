"""The buffers and events of one step in flight.

A slot has one holder at a time: from `launch` until `collect`. Only the holder writes the host's side, and it knows by
`d2h_over` that the device is done with all of it.

    host_in --h2d--> device_in --compute--> device_out --d2h--> host_out
              h2d_over          compute_over           d2h_over
    host_masks --h2d--> device_masks --compute                 of a step in two halves, behind its first
                 masks_over
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gapless.device.base import Buffer, Device, Event, Timer


@dataclass(frozen=True, slots=True)
class Slot:
    """Host and device buffers, the events, and the timer, of one step."""

    host_in: Buffer  # [capacity] int32, host: the packed plan
    device_in: Buffer  # [capacity] int32, device
    device_out: Buffer  # [result_capacity] int32, device: sampled tokens, then scores; copied as far as the plan says
    host_out: Buffer  # [result_capacity] int32, host
    host_masks: Buffer  # [mask_capacity] int32, host: rows that get a new mask, and the masks
    device_masks: Buffer  # [mask_capacity] int32, device
    h2d_over: Event
    masks_over: Event
    compute_over: Event
    d2h_over: Event
    timer: Timer

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return self.host_in, self.device_in, self.device_out, self.host_out, self.host_masks, self.device_masks


class Untimed:
    """A timer that does not look at the clock, for steps that nobody records."""

    def around(self, part: int, fn: Callable[[], None]) -> Callable[[], None]:
        return fn

    def read(self) -> tuple[float, ...]:
        return ()


def make_slot(
    device: Device, index: int, capacity: int, result_capacity: int, mask_capacity: int, *, timed: bool
) -> Slot:
    """A slot whose buffers and events carry its index in their names."""
    name = f"slot{index}"
    return Slot(
        host_in=device.buffer(f"{name}.host_in", (capacity,), torch.int32, host=True),
        device_in=device.buffer(f"{name}.device_in", (capacity,), torch.int32),
        device_out=device.buffer(f"{name}.device_out", (result_capacity,), torch.int32),
        host_out=device.buffer(f"{name}.host_out", (result_capacity,), torch.int32, host=True),
        host_masks=device.buffer(f"{name}.host_masks", (mask_capacity,), torch.int32, host=True),
        device_masks=device.buffer(f"{name}.device_masks", (mask_capacity,), torch.int32),
        masks_over=device.event(f"{name}.masks_over"),
        h2d_over=device.event(f"{name}.h2d_over"),
        compute_over=device.event(f"{name}.compute_over"),
        d2h_over=device.event(f"{name}.d2h_over"),
        timer=device.timer() if timed else Untimed(),
    )
