"""The happens-before checker: each rule, found whatever the timing of the run happened to be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gapless.device.base import INSIDE, Buffer, Stream
from gapless.device.checker import POISON, CheckedDevice
from gapless.device.cpu import CpuDevice
from gapless.errors import RaceError


class Bench:
    """A checked device with one buffer, and short words for what may be done to it."""

    def __init__(self, device: CheckedDevice) -> None:
        self.device = device
        self.x = device.buffer("x", (1,), torch.int32, host=True)
        self.y = device.buffer("y", (1,), torch.int32, host=True)
        self.h2d, self.compute, self.d2h = device.stream("h2d"), device.stream("compute"), device.stream("d2h")

    def read(self, who: Stream | None, buffer: Buffer | None = None) -> None:
        self._do(who, "read", reads=(buffer or self.x,))

    def write(self, who: Stream | None, buffer: Buffer | None = None) -> None:
        self._do(who, "write", writes=(buffer or self.x,))

    def _do(self, who: Stream | None, label: str, **what: tuple[Buffer]) -> None:
        if who is None:
            self.device.touch(f"host {label}", **what)
        else:
            who.run(lambda: None, f"{who.name} {label}", **what)

    def order(self, first: Stream, then: Stream | None) -> None:
        """An event from the first to the other; None is the host."""
        event = self.device.event("order")
        first.record(event)
        if then is None:
            event.synchronize()
        else:
            then.wait(event)


@pytest.fixture(params=["threads", 0, 1])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    inner = CpuDevice() if request.param == "threads" else CpuDevice(seed=request.param)
    device = CheckedDevice(inner)
    yield Bench(device)
    device.close()


CONFLICTS = [("write", "read"), ("read", "write"), ("write", "write")]


@pytest.mark.parametrize(("first", "then"), CONFLICTS)
def test_two_streams_without_an_event(bench: Bench, first: str, then: str) -> None:
    getattr(bench, first)(bench.h2d)
    with pytest.raises(RaceError) as caught:
        getattr(bench, then)(bench.compute)
    assert str(caught.value) == (
        f"compute {then} (compute) {then}s 'x' with no event after h2d {first} (h2d), which {first}s it"
    )


@pytest.mark.parametrize(("first", "then"), CONFLICTS)
def test_two_streams_with_an_event(bench: Bench, first: str, then: str) -> None:
    getattr(bench, first)(bench.h2d)
    bench.order(bench.h2d, bench.compute)
    getattr(bench, then)(bench.compute)


@pytest.mark.parametrize(("first", "then"), CONFLICTS)
def test_the_host_after_a_stream(bench: Bench, first: str, then: str) -> None:
    getattr(bench, first)(bench.d2h)
    with pytest.raises(RaceError, match=f"host {then} \\(host\\) {then}s 'x' with no event after d2h {first}"):
        getattr(bench, then)(None)


@pytest.mark.parametrize(("first", "then"), CONFLICTS)
def test_the_host_after_a_stream_that_it_waited_for(bench: Bench, first: str, then: str) -> None:
    getattr(bench, first)(bench.d2h)
    bench.order(bench.d2h, None)
    getattr(bench, then)(None)


@pytest.mark.parametrize(("first", "then"), CONFLICTS)
def test_a_stream_after_the_host_is_ordered_by_being_queued(bench: Bench, first: str, then: str) -> None:
    getattr(bench, first)(None)
    getattr(bench, then)(bench.h2d)


def test_the_host_may_not_write_what_a_queued_copy_still_reads(bench: Bench) -> None:
    """The most frequent mistake of the field: the staging buffer of a step is filled again too early."""
    bench.write(None)
    bench.read(bench.h2d)
    with pytest.raises(RaceError, match=r"host write \(host\) writes 'x' with no event after h2d read"):
        bench.write(None)


def test_two_readers_need_no_order(bench: Bench) -> None:
    bench.write(None)
    bench.read(bench.h2d)
    bench.read(bench.compute)
    bench.read(None)


def test_a_writer_must_come_after_every_reader(bench: Bench) -> None:
    bench.read(bench.h2d)
    bench.read(bench.d2h)
    bench.order(bench.h2d, bench.compute)
    with pytest.raises(RaceError, match="after d2h read"):
        bench.write(bench.compute)


def test_one_stream_is_ordered_by_itself(bench: Bench) -> None:
    bench.write(bench.compute)
    bench.read(bench.compute)
    bench.write(bench.compute)


def test_order_passes_through_two_events(bench: Bench) -> None:
    bench.write(bench.h2d)
    bench.order(bench.h2d, bench.compute)
    bench.order(bench.compute, bench.d2h)
    bench.read(bench.d2h)


def test_order_passes_through_the_host(bench: Bench) -> None:
    bench.write(bench.h2d)
    bench.order(bench.h2d, None)
    bench.write(bench.compute)


def test_the_host_learns_through_one_event_what_led_to_it(bench: Bench) -> None:
    """Synchronizing with the copy out is enough to fill the step's first buffer again."""
    bench.read(bench.h2d)
    bench.order(bench.h2d, bench.compute)
    bench.order(bench.compute, bench.d2h)
    bench.order(bench.d2h, None)
    bench.write(None)


def test_order_the_other_way_round_is_no_order(bench: Bench) -> None:
    bench.order(bench.compute, bench.h2d)
    bench.write(bench.h2d)
    with pytest.raises(RaceError):
        bench.read(bench.compute)


def test_a_record_before_the_work_does_not_cover_it(bench: Bench) -> None:
    event = bench.device.event("early")
    bench.h2d.record(event)
    bench.write(bench.h2d)
    bench.compute.wait(event)
    with pytest.raises(RaceError):
        bench.read(bench.compute)


def test_a_wait_covers_the_record_that_it_saw_and_no_later_one(bench: Bench) -> None:
    event = bench.device.event("twice")
    bench.write(bench.h2d)
    bench.h2d.record(event)
    bench.compute.wait(event)
    bench.read(bench.compute)
    bench.write(bench.h2d, bench.y)
    bench.h2d.record(event)
    with pytest.raises(RaceError, match="'y'"):
        bench.read(bench.compute, bench.y)


def test_an_event_never_recorded_orders_nothing(bench: Bench) -> None:
    event = bench.device.event("never")
    bench.write(bench.h2d)
    bench.compute.wait(event)
    event.synchronize()
    with pytest.raises(RaceError):
        bench.read(bench.compute)


def test_other_buffers_are_other_affairs(bench: Bench) -> None:
    bench.write(bench.h2d, bench.x)
    bench.write(bench.compute, bench.y)


def test_buffers_are_told_apart_by_what_they_are_and_not_by_name(bench: Bench) -> None:
    twin = bench.device.buffer("x", (1,), torch.int32, host=True)
    bench.write(bench.h2d, bench.x)
    bench.write(bench.compute, twin)


def test_query_orders_the_host_only_when_it_says_true() -> None:
    device = CheckedDevice(CpuDevice())
    bench = Bench(device)
    event = device.event("over")
    bench.write(bench.h2d)
    bench.h2d.record(event)
    while not event.query():
        pass
    bench.read(None)
    device.close()


def test_query_that_says_false_orders_nothing() -> None:
    for seed in range(20):
        device = CheckedDevice(CpuDevice(seed=seed))
        bench = Bench(device)
        event = device.event("over")
        bench.write(bench.h2d)
        bench.h2d.record(event)
        if not event.query():
            with pytest.raises(RaceError):
                bench.read(None)
            return
    raise AssertionError("no seed leaves the event open")


def test_a_race_is_found_even_when_this_run_was_lucky() -> None:
    """The first operation is long over when the second is queued; the checker knows that this was chance."""
    device = CheckedDevice(CpuDevice())
    bench = Bench(device)
    bench.write(bench.h2d)
    probe = device.event("probe")
    bench.h2d.record(probe)
    while not probe.inner.query():
        pass
    with pytest.raises(RaceError):
        bench.read(bench.compute)
    device.close()


def test_the_host_is_ordered_even_when_the_step_failed() -> None:
    device = CheckedDevice(CpuDevice(seed=0))
    bench = Bench(device)
    event = device.event("over")

    def boom() -> None:
        raise RuntimeError("boom")

    bench.compute.run(boom, "boom", writes=(bench.x,))
    bench.compute.record(event)
    with pytest.raises(RuntimeError, match="boom"):
        event.synchronize()
    bench.write(None)


def test_accesses_are_counted_and_work_is_passed_on(bench: Bench) -> None:
    log: list[str] = []
    bench.compute.run(lambda: log.append("ran"), "note", reads=(bench.x,), writes=(bench.y,))
    bench.order(bench.compute, None)
    assert (log, bench.device.checker.num_accesses) == (["ran"], 2)
    assert len(bench.device.timer().read()) == 6 + len(INSIDE)


def test_a_released_buffer_may_not_be_read_before_it_is_written(bench: Bench) -> None:
    bench.write(None)
    bench.device.release("collect 3", (bench.x,))
    with pytest.raises(RaceError) as caught:
        bench.read(bench.h2d)
    assert str(caught.value) == (
        "h2d read (h2d) reads 'x', which nobody has written since collect 3 released it (generation 1)"
    )
    bench.write(None)
    bench.read(bench.h2d)


def test_a_buffer_may_not_be_released_while_a_stream_uses_it(bench: Bench) -> None:
    bench.write(None)
    bench.read(bench.h2d)
    with pytest.raises(RaceError, match=r"collect \(host\) releases 'x' with no event after h2d read"):
        bench.device.release("collect", (bench.x,))
    bench.order(bench.h2d, None)
    bench.device.release("collect", (bench.x, bench.y))


def test_released_buffers_hold_poison_and_have_a_generation(bench: Bench) -> None:
    checker = bench.device.checker
    assert checker.generation(bench.x) == 0
    for count in (1, 2):
        bench.x.array[:] = 7
        bench.device.release("collect", (bench.x,))
        assert (bench.x.array[0], checker.generation(bench.x), checker.generation(bench.y)) == (POISON, count, 0)
