"""Streams and events on the CPU mean what CUDA's mean, with threads and with seeded interleavings."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from gapless.device.base import COMPUTE, D2H, H2D, SAMPLING, Device
from gapless.device.cpu import CpuDevice, InlineDriver

Log = list[str]
TIMEOUT_S = 10.0


@pytest.fixture(params=["threads", *range(8)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = CpuDevice() if request.param == "threads" else CpuDevice(seed=request.param)
    yield device
    device.close()


@pytest.fixture
def threaded() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


def note(log: Log, text: str) -> Callable[[], None]:
    return lambda: log.append(text)


def hold(gate: threading.Event) -> Callable[[], None]:
    def wait() -> None:
        assert gate.wait(TIMEOUT_S), "the gate was never opened"

    return wait


def finish(device: Device) -> None:
    """Wait for all that was queued on the three streams."""
    for stream in (device.stream("h2d"), device.stream("compute"), device.stream("d2h")):
        event = device.event(f"end of {stream.name}")
        stream.record(event)
        event.synchronize()


def test_a_stream_runs_in_order(device: Device) -> None:
    log: Log = []
    for number in range(50):
        device.stream("compute").run(note(log, str(number)), "note")
    finish(device)
    assert log == [str(number) for number in range(50)]


def test_a_wait_holds_the_other_stream_until_the_record(device: Device) -> None:
    for _ in range(20):
        log: Log = []
        event = device.event("over")
        device.stream("h2d").run(note(log, "copy"), "copy")
        device.stream("h2d").record(event)
        device.stream("compute").wait(event)
        device.stream("compute").run(note(log, "compute"), "compute")
        finish(device)
        assert log == ["copy", "compute"]


def test_synchronize_holds_the_host_until_the_record(device: Device) -> None:
    log: Log = []
    event = device.event("over")
    for number in range(3):
        device.stream("d2h").run(note(log, str(number)), "note")
    device.stream("d2h").record(event)
    event.synchronize()
    assert log == ["0", "1", "2"]
    assert event.query()


def test_an_event_that_was_never_recorded_holds_nobody(device: Device) -> None:
    log: Log = []
    event = device.event("never")
    event.synchronize()
    assert event.query()
    device.stream("compute").wait(event)
    device.stream("compute").run(note(log, "ran"), "note")
    finish(device)
    assert log == ["ran"]


def test_a_wait_queued_before_the_record_does_not_wait_for_it(threaded: CpuDevice) -> None:
    gate, log = threading.Event(), []
    event = threaded.event("late")
    threaded.stream("compute").wait(event)  # nothing recorded yet
    threaded.stream("compute").run(note(log, "ran"), "note")
    threaded.stream("h2d").run(hold(gate), "hold")
    threaded.stream("h2d").record(event)
    end = threaded.event("end")
    threaded.stream("compute").record(end)
    end.synchronize()
    assert log == ["ran"]
    gate.set()


def test_a_waiter_keeps_the_record_that_it_saw(threaded: CpuDevice) -> None:
    """Recorded again, the event has a new point; who waited for the old one is not held by the new one."""
    gate, log = threading.Event(), []
    event, end = threaded.event("twice"), threaded.event("end")
    threaded.stream("h2d").record(event)
    threaded.stream("compute").wait(event)
    threaded.stream("h2d").run(hold(gate), "hold")
    threaded.stream("h2d").record(event)
    threaded.stream("compute").run(note(log, "ran"), "note")
    threaded.stream("compute").record(end)
    end.synchronize()
    assert (log, event.query()) == (["ran"], False)
    gate.set()
    event.synchronize()
    assert event.query()


def test_synchronize_means_the_latest_record(threaded: CpuDevice) -> None:
    log: Log = []
    gate = threading.Event()
    event = threaded.event("twice")
    threaded.stream("h2d").record(event)
    event.synchronize()
    threaded.stream("h2d").run(hold(gate), "hold")
    threaded.stream("h2d").run(note(log, "ran"), "note")
    threaded.stream("h2d").record(event)
    assert not event.query()
    gate.set()
    event.synchronize()
    assert log == ["ran"]


def test_streams_run_beside_each_other_and_the_host(threaded: CpuDevice) -> None:
    """Each side waits for the other: without overlap this would stand still."""
    host, stream = threading.Event(), threading.Event()
    event = threaded.event("over")
    threaded.stream("h2d").run(hold(host), "wait for the host")
    threaded.stream("h2d").run(stream.set, "tell compute")
    threaded.stream("compute").run(hold(stream), "wait for h2d")
    threaded.stream("compute").record(event)
    assert not event.query()
    host.set()
    event.synchronize()


class Boom(RuntimeError):
    pass


def boom() -> None:
    raise Boom("on the stream")


def test_an_error_reaches_the_host_at_synchronize(device: Device) -> None:
    event = device.event("over")
    device.stream("compute").run(boom, "boom")
    device.stream("compute").record(event)
    with pytest.raises(Boom, match="on the stream"):
        event.synchronize()


def test_an_error_skips_what_follows_it_up_to_the_record(device: Device) -> None:
    log: Log = []
    event, later = device.event("over"), device.event("later")
    device.stream("compute").run(boom, "boom")
    device.stream("compute").run(note(log, "skipped"), "note")
    device.stream("compute").record(event)
    device.stream("compute").run(note(log, "next step"), "note")
    device.stream("compute").record(later)
    later.synchronize()
    assert log == ["next step"]
    with pytest.raises(Boom):
        event.synchronize()


def test_an_error_travels_with_the_events(device: Device) -> None:
    """A failed copy in fails the compute and the copy out of its own step, and leaves the next step alone."""
    log: Log = []
    steps = []
    for step in (1, 2):
        h2d, compute, d2h = (device.event(f"{name} {step}") for name in ("h2d", "compute", "d2h"))
        device.stream("h2d").run(boom if step == 1 else note(log, "in"), "in")
        device.stream("h2d").record(h2d)
        device.stream("compute").wait(h2d)
        device.stream("compute").run(note(log, f"compute {step}"), "compute")
        device.stream("compute").record(compute)
        device.stream("d2h").wait(compute)
        device.stream("d2h").run(note(log, f"out {step}"), "out")
        device.stream("d2h").record(d2h)
        steps.append(d2h)
    with pytest.raises(Boom):
        steps[0].synchronize()
    steps[1].synchronize()
    assert log == ["in", "compute 2", "out 2"]


def test_close_runs_what_was_queued_first(device: Device) -> None:
    log: Log = []
    event = device.event("over")
    device.stream("h2d").run(note(log, "in"), "in")
    device.stream("h2d").record(event)
    device.stream("compute").wait(event)
    device.stream("compute").run(note(log, "compute"), "compute")
    device.close()
    assert log == ["in", "compute"]


def test_close_ends_the_threads() -> None:
    before = set(threading.enumerate())
    device = CpuDevice()
    streams = [device.stream(name) for name in ("h2d", "offload", "h2d")]  # a name is a stream, made once
    started = set(threading.enumerate()) - before
    assert sorted(thread.name for thread in started) == ["gapless-h2d", "gapless-offload"]
    assert streams[0] is streams[2]
    device.close()
    assert not any(thread.is_alive() for thread in started)


def test_a_device_with_a_seed_has_no_threads() -> None:
    before = threading.active_count()
    device = CpuDevice(seed=1)
    device.stream("compute").run(lambda: None, "nothing")
    assert threading.active_count() == before


def trace(seed: int) -> Log:
    """The order in which three streams without events run."""
    log: Log = []
    device = CpuDevice(seed=seed)
    for number in range(12):
        for stream in (device.stream("h2d"), device.stream("compute"), device.stream("d2h")):
            stream.run(note(log, f"{stream.name} {number}"), "note")
    device.close()
    assert len(log) == 36
    for name in ("h2d", "compute", "d2h"):
        assert [entry for entry in log if entry.startswith(name)] == [f"{name} {number}" for number in range(12)]
    return log


def test_a_seed_gives_always_the_same_interleaving() -> None:
    assert trace(3) == trace(3)


def test_seeds_give_different_interleavings() -> None:
    orders = {tuple(trace(seed)) for seed in range(20)}
    assert len(orders) == 20


def test_streams_without_an_event_overtake_each_other() -> None:
    """Of two operations that are both pending, some seeds run the one first and some the other."""
    seen = set()
    for seed in range(40):
        log: Log = []
        device = CpuDevice(seed=seed)
        for stream in (device.stream("h2d"), device.stream("compute")):
            stream.run(note(log, stream.name), "note")
        device.close()
        seen.add(tuple(log))
    assert seen == {("h2d", "compute"), ("compute", "h2d")}


def test_a_seeded_device_runs_work_late_and_early() -> None:
    """After queueing, some seeds have run the operation and some have not: the host can rely on neither."""
    seen = set()
    for seed in range(20):
        log: Log = []
        device = CpuDevice(seed=seed)
        device.stream("compute").run(note(log, "ran"), "note")
        seen.add(len(log))
        device.close()
    assert seen == {0, 1}


def test_a_timer_sees_work_and_not_waiting(threaded: CpuDevice) -> None:
    gate = threading.Event()
    event, timer = threaded.event("over"), threaded.timer()
    threaded.stream("h2d").run(timer.around(H2D, hold(gate)), "hold")
    threaded.stream("h2d").record(event)
    threaded.stream("compute").wait(event)
    threaded.stream("compute").run(timer.around(COMPUTE, lambda: None), "nothing")
    threading.Timer(0.2, gate.set).start()
    finish(threaded)
    h2d_begin, h2d_end, begin, end, *d2h, launch, compiling, allocation, masks = timer.read()
    assert h2d_end - h2d_begin >= 0.15
    assert h2d_end <= begin <= end < begin + 0.1
    assert (launch, compiling, allocation, masks) == (0, 0, 0, 0)  # a step is one call of a thread
    assert all(math.isnan(moment) for moment in (*d2h, *timer.read()[:6]))


def test_between_two_halves_a_step_idles(threaded: CpuDevice) -> None:
    timer, compute, gate = threaded.timer(), threaded.stream("compute"), threading.Event()
    for _ in range(2):  # the second time it has forgotten the first
        gate.clear()
        compute.run(timer.around(COMPUTE, lambda: time.sleep(0.05)), "model")
        compute.run(lambda: gate.wait(10) and None, "masks")
        compute.run(timer.around(SAMPLING, lambda: time.sleep(0.05)), "sampling")
        threading.Timer(0.2, gate.set).start()
        finish(threaded)
        _, _, begin, end, *_, masks = timer.read()
        assert 0.1 < masks < end - begin - 0.09


def test_a_timer_sees_the_end_of_work_that_raises() -> None:
    device = CpuDevice(driver=InlineDriver())
    timer = device.timer()
    for part in (COMPUTE, D2H):
        device.stream("compute").run(timer.around(part, lambda: 1 // 0), "boom")  # the second is skipped
    times = timer.read()
    assert times[2] <= times[3]
    assert math.isnan(times[4])


def test_the_inline_driver_runs_at_once() -> None:
    log: Log = []
    device = CpuDevice(driver=InlineDriver())
    event = device.event("over")
    device.stream("h2d").run(note(log, "in"), "in")
    assert log == ["in"]
    device.stream("h2d").record(event)
    device.stream("compute").wait(event)
    event.synchronize()
    device.close()


def test_buffers_are_zeroed_and_only_host_buffers_are_seen_by_the_host() -> None:
    device = CpuDevice(seed=0)
    host = device.buffer("h", (2, 3), torch.int32, host=True)
    inner = device.buffer("d", (4,), torch.float32)
    assert (host.tensor.shape, host.tensor.dtype, inner.tensor.dtype) == ((2, 3), torch.int32, torch.float32)
    assert not host.tensor.any()
    assert not inner.tensor.any()
    host.array[1, 2] = 7
    assert host.tensor[1, 2] == 7
    assert inner.array.size == 0
    assert repr(host) == "Buffer(h)"
