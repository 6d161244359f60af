"""The executor with one thing wrong: a table of such mistakes, and the device that makes them possible.

`faults.py` has the mistakes of everybody else, and runs both. `ScriptedDevice` writes down what one launch puts on the
streams; a mutant edits that script before it is played to the real device. In the order of `LocalExecutor.launch` the
script is

    h2d.run  h2d.record(h2d_over)  compute.wait(h2d_over)  compute.run  compute.record(compute_over)
    d2h.wait(compute_over)  d2h.run  d2h.record(d2h_over)

That of an open step ends with `compute.run`. `complete` has a script of its own, the same again with masks and
`masks_over` in place of the plan and `h2d_over`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from gapless.core.limits import Limits
from gapless.core.plan import Plan
from gapless.core.request import IntArray
from gapless.device.base import STREAMS, Buffer, Device, Event, Stream
from gapless.pipeline.executor import FillMasks, LocalExecutor, StepRunner, Ticket
from gapless.proof.rule import Rule
from gapless.runner.calls import Call
from gapless.runner.fill import Filled


@dataclass(frozen=True)
class Line:
    """One line of the script."""

    stream: str
    verb: str
    play: Callable[[Stream], None]


Script = list[Line]
Edit = Callable[[Script], Script]


class ScriptedStream:
    """A stream that only writes down what it is told."""

    def __init__(self, name: str, script: Script) -> None:
        self.name = name
        self._script = script

    def run(
        self, fn: Callable[[], None], label: str, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        self._add("run", lambda stream: stream.run(fn, label, reads=reads, writes=writes))

    def record(self, event: Event) -> None:
        self._add("record", lambda stream: stream.record(event))

    def wait(self, event: Event) -> None:
        self._add("wait", lambda stream: stream.wait(event))

    def _add(self, verb: str, play: Callable[[Stream], None]) -> None:
        self._script.append(Line(self.name, verb, play))


class ScriptedDevice:
    """A device whose streams write a script, which `play` passes on, edited."""

    def __init__(self, inner: Device) -> None:
        self._inner = inner
        self._script: Script = []
        self.torch_device, self.num_cores = inner.torch_device, inner.num_cores
        self._streams = {name: ScriptedStream(name, self._script) for name in STREAMS}
        self.stream = self._streams.__getitem__
        self.event, self.buffer, self.touch, self.close = inner.event, inner.buffer, inner.touch, inner.close
        self.release, self.kv_budget, self.timer = inner.release, inner.kv_budget, inner.timer
        self.late, self.watch, self.as_launch = inner.late, inner.watch, inner.as_launch

    def play(self, edit: Edit) -> None:
        for line in edit(list(self._script)):
            line.play(self._inner.stream(line.stream))
        self._script.clear()


class Mutant(LocalExecutor):
    """The executor, its streams' script edited by `edit`. Subclasses break other things."""

    def __init__(self, device: Device, runner: StepRunner, limits: Limits, num_slots: int, edit: Edit) -> None:
        self._scripted = ScriptedDevice(device)
        self._edit = edit
        super().__init__(self._scripted, runner, limits, num_slots)

    def launch(self, plan: Plan) -> Ticket:
        ticket = super().launch(plan)
        self._scripted.play(self._edit)
        return ticket

    def complete(self, ticket: Ticket, fill_masks: FillMasks, calls: tuple[Call, ...] = ()) -> Ticket:
        ticket = super().complete(ticket, fill_masks, calls)
        self._scripted.play(self._edit)
        return ticket


class MaskMutant(Mutant):
    """Only second halves are edited."""

    def launch(self, plan: Plan) -> Ticket:
        ticket = LocalExecutor.launch(self, plan)
        self._scripted.play(keep)
        return ticket


def keep(script: Script) -> Script:
    return script


def drop(stream: str, verb: str) -> Edit:
    return lambda script: [line for line in script if (line.stream, line.verb) != (stream, verb)]


def early(stream: str) -> Edit:
    """The record of this stream comes before its work."""

    def edit(script: Script) -> Script:
        work, record = (_find(script, stream, verb) for verb in ("run", "record"))
        script[work], script[record] = script[record], script[work]
        return script

    return edit


def moved(stream: str, verb: str, to: str) -> Edit:
    """One line is put on another stream."""

    def edit(script: Script) -> Script:
        index = _find(script, stream, verb)
        script[index] = replace(script[index], stream=to)
        return script

    return edit


def odd_steps_compute_on(stream: str) -> Edit:
    """Every second step has its compute on another stream, with the waits and records that belong to it."""
    steps = iter(range(10**6))

    def edit(script: Script) -> Script:
        if next(steps) % 2 == 0:
            return script
        return [replace(line, stream=stream) if line.stream == "compute" else line for line in script]

    return edit


def sampled_first(script: Script) -> Script:
    """The second half is queued before its masks are filled and copied."""
    script.insert(0, script.pop(_find(script, "compute", "run")))
    return script


def _find(script: Script, stream: str, verb: str) -> int:
    return next(i for i, line in enumerate(script) if (line.stream, line.verb) == (stream, verb))


class NoSynchronize(Mutant):
    """Collect reads the tokens without waiting."""

    def collect(self, ticket: Ticket) -> IntArray:
        assert ticket.slot is not None
        slot = replace(ticket.slot, d2h_over=self._device.event("never recorded"))
        tokens = super().collect(Ticket(ticket.plan, slot))
        self._free[-1] = ticket.slot
        return tokens


class FreedAtLaunch(Mutant):
    """A slot is free as soon as its step is launched, and the next step takes it at once.

    With a first-in-first-out free list and as many slots as the depth this would be harmless, for the loop collects
    step n before it launches step n + depth; nothing but that stands between it and a race.
    """

    def launch(self, plan: Plan) -> Ticket:
        ticket = super().launch(plan)
        assert ticket.slot is not None
        self._free.appendleft(ticket.slot)
        return ticket

    def collect(self, ticket: Ticket) -> IntArray:
        try:
            return super().collect(ticket)
        finally:
            self._free.pop()


class OneSlotTwice(Mutant):
    """Two steps in flight have the same slot object."""

    def __init__(self, device: Device, runner: StepRunner, limits: Limits, num_slots: int, edit: Edit) -> None:
        super().__init__(device, runner, limits, 1, edit)
        self._free = deque([self._free[0]] * num_slots)


class HostWritesAfterLaunch(Mutant):
    """The host clears its buffer as soon as the step is launched."""

    def launch(self, plan: Plan) -> Ticket:
        ticket = super().launch(plan)
        assert ticket.slot is not None
        self._device.touch("clear", writes=(ticket.slot.host_in,))
        ticket.slot.host_in.array[:] = 0
        return ticket


class MasksWrittenAfterLaunch(MaskMutant):
    """The host clears its masks as soon as the second half is launched."""

    def complete(self, ticket: Ticket, fill_masks: FillMasks, calls: tuple[Call, ...] = ()) -> Ticket:
        ticket = super().complete(ticket, fill_masks, calls)
        assert ticket.slot is not None
        self._device.touch("clear", writes=(ticket.slot.host_masks,))
        ticket.slot.host_masks.array[2 * self._num_rows :] = 0
        return ticket


def sharing(field: str) -> type[Mutant]:
    """The slots have this buffer or event in common, and the rest of their own."""

    class Sharing(Mutant):
        def __init__(self, device: Device, runner: StepRunner, limits: Limits, num_slots: int, edit: Edit) -> None:
            super().__init__(device, runner, limits, num_slots, edit)
            shared = getattr(self._free[0], field)
            self._free = deque(replace(slot, **{field: shared}) for slot in self._free)

    return Sharing


@dataclass(frozen=True)
class Mistake:
    """A mutant, and which of the detectors see it."""

    name: str
    make: type[Mutant] = Mutant
    edit: Callable[[], Edit] = lambda: keep  # made anew for each run: an edit may count steps
    race: bool = True  # the checker raises, whatever the timing
    tokens: bool = True  # under some seed the tokens are wrong
    stall: bool = False  # a step comes back only after the next one has run too
    rule: Rule | None = None  # guides every request; None: no request is guided


MISTAKES = [
    # each wait and each record of the script left out
    Mistake("compute does not wait for h2d_over", edit=lambda: drop("compute", "wait")),
    Mistake("d2h does not wait for compute_over", edit=lambda: drop("d2h", "wait")),
    Mistake("collect does not synchronize with d2h_over", NoSynchronize),
    Mistake("h2d_over is never recorded", edit=lambda: drop("h2d", "record")),
    Mistake("compute_over is never recorded", edit=lambda: drop("compute", "record")),
    Mistake("d2h_over is never recorded", edit=lambda: drop("d2h", "record")),
    # recorded at the wrong point, or on the wrong stream
    Mistake("h2d_over is recorded before the copy", edit=lambda: early("h2d")),
    Mistake("compute_over is recorded before the compute", edit=lambda: early("compute")),
    Mistake("d2h_over is recorded before the copy", edit=lambda: early("d2h")),
    Mistake("h2d_over is recorded on compute", edit=lambda: moved("h2d", "record", "compute")),
    Mistake("h2d_over is recorded on d2h", edit=lambda: moved("h2d", "record", "d2h")),
    Mistake("compute_over is recorded on h2d", edit=lambda: moved("compute", "record", "h2d")),
    Mistake("compute_over is recorded on d2h", edit=lambda: moved("compute", "record", "d2h")),
    Mistake("d2h_over is recorded on compute", edit=lambda: moved("d2h", "record", "compute")),
    Mistake("d2h_over is recorded on h2d", edit=lambda: moved("d2h", "record", "h2d")),
    # the wrong stream holds back
    Mistake("h2d waits for h2d_over instead of compute", edit=lambda: moved("compute", "wait", "h2d")),
    Mistake("compute waits for compute_over instead of d2h", edit=lambda: moved("d2h", "wait", "compute")),
    # two compute streams: rows and KV blocks have no order any more
    Mistake("odd steps compute on h2d", edit=lambda: odd_steps_compute_on("h2d")),
    Mistake("odd steps compute on d2h", edit=lambda: odd_steps_compute_on("d2h")),
    # what belongs to one step belongs to two
    Mistake("one slot is used by two steps in flight", OneSlotTwice),
    Mistake("a slot is freed at launch", FreedAtLaunch),
    Mistake("the host writes its buffer after launch", HostWritesAfterLaunch),
    Mistake("slots share host_in", sharing("host_in")),
    Mistake("slots share device_in", sharing("device_in")),
    Mistake("slots share device_out", sharing("device_out")),
    Mistake("slots share host_out", sharing("host_out")),
    # masks: the second half of a step
    Mistake("sampling does not wait for masks_over", MaskMutant, lambda: drop("compute", "wait"), rule=Rule(1)),
    Mistake("sampling is launched before its masks are filled", MaskMutant, lambda: sampled_first, rule=Rule(1)),
    Mistake("masks_over is never recorded", MaskMutant, lambda: drop("h2d", "record"), rule=Rule(1)),
    Mistake("masks_over is recorded before the copy", MaskMutant, lambda: early("h2d"), rule=Rule(1)),
    Mistake("masks_over is recorded on compute", MaskMutant, lambda: moved("h2d", "record", "compute"), rule=Rule(1)),
    Mistake("masks_over is recorded on d2h", MaskMutant, lambda: moved("h2d", "record", "d2h"), rule=Rule(1)),
    Mistake("tokens of an open step are copied out too early", MaskMutant, lambda: drop("d2h", "wait"), rule=Rule(1)),
    Mistake("the host writes its masks after launch", MasksWrittenAfterLaunch, rule=Rule(1)),
    # masks that follow from the step before are filled when that is over; others may meet in flight
    Mistake("slots share host_masks", sharing("host_masks"), rule=Rule(1, waits=False)),
    Mistake("slots share device_masks", sharing("device_masks"), rule=Rule(1, waits=False)),
    # Neither the checker nor the tokens can see this one, for waiting too long is no race: collecting step n waits for
    # step n + 1, so that depth 2 is depth 1 again; and an error of step n is lost. (Sharing h2d_over or compute_over
    # is no mistake with these semantics: their waits are queued before the next step records them again.)
    Mistake("slots share d2h_over", sharing("d2h_over"), race=False, tokens=False, stall=True),
]


class CountingRunner:
    """A runner that counts the steps that have run."""

    def __init__(self, inner: StepRunner) -> None:
        self._inner = inner
        self.buffers = inner.buffers
        self.mask_words = inner.mask_words
        self.fill, self.forward, self.sample = inner.fill, inner.forward, inner.sample
        self.num_steps = 0

    def step(self, filled: Filled, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        self.num_steps += 1
        self._inner.step(filled, packed_plan, out)
