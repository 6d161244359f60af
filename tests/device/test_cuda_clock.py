"""Device times on the host's clock, with events that behave as CUDA's do: other zero, drift, 32-bit milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from gapless.device import cuda
from gapless.device.base import COMPUTE, D2H, H2D, INSIDE
from gapless.device.late import Late


@dataclass
class World:
    """A host and a device, each with its clock. Time passes when somebody says so."""

    drift: float
    now: float = 1000.0
    streams: tuple[str, ...] = ("h2d", "compute", "d2h")
    reached: dict[str, float] = field(default_factory=dict)  # host time at which a stream's last event is reached

    def perf_counter(self) -> float:
        return self.now

    def device_ms(self, moment: float) -> float:
        return (moment - 77.0) * (1 + self.drift) * 1e3


class FakeEvent:
    world: World

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.moment = float("nan")

    def record(self, stream: str) -> None:
        self.moment = self.world.reached.get(stream, self.world.now)

    def synchronize(self) -> None:
        self.world.now += 8e-6

    def elapsed_time(self, other: FakeEvent) -> float:
        if np.isnan(self.moment) or np.isnan(other.moment):
            raise RuntimeError("not recorded")
        return float(np.float32(self.world.device_ms(other.moment) - self.world.device_ms(self.moment)))


def play(world: World, timer: cuda.CudaTimer, took: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """One step: queued, run, waited for. What the timer says, and what is true."""
    queued = world.now
    truth = (queued + 5e-6, queued + 9e-6, queued + 12e-6, queued + 12e-6 + took)
    moments = iter(truth)
    for part, stream in ((H2D, "h2d"), (COMPUTE, "compute")):
        world.reached[stream] = next(moments)

        def work(stream: str = stream) -> None:
            world.reached[stream] = next(moments)

        timer.around(part, work)()
    world.reached["d2h"] = truth[3] + 6e-6
    timer.around(D2H, lambda: None)()
    world.now = truth[3] + 6e-6 + 20e-6
    return timer.read()[:6], (*truth, truth[3], truth[3] + 6e-6)


@pytest.mark.parametrize("drift", [0.0, 2e-5, -2e-5])
def test_times_stay_right_over_hours_whatever_the_clocks_do(drift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(drift)
    monkeypatch.setattr(FakeEvent, "world", world, raising=False)
    monkeypatch.setattr(cuda.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(cuda.time, "perf_counter", world.perf_counter)
    clock = cuda.CudaClock("compute")  # type: ignore[arg-type]
    timers = [cuda.CudaTimer(clock, world.streams, Late()) for _ in range(2)]  # type: ignore[arg-type]
    last = 0.0
    for step in range(4000):
        world.now += 3.0 if step % 2 else 1e-4  # two hours, most of them with nothing to run
        found, truth = play(world, timers[step % 2], took=1e-3)
        assert found == pytest.approx(truth, abs=60e-6)
        assert found[3] - found[2] == pytest.approx(1e-3, abs=1e-6)
        assert found[0] >= last
        last = found[3]


def test_a_device_that_tells_no_times_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "world", World(0.0), raising=False)
    monkeypatch.setattr(cuda.torch.cuda, "Event", FakeEvent)
    timer = cuda.CudaTimer(cuda.CudaClock("compute"), ("h2d", "compute", "d2h"), Late())  # type: ignore[arg-type]
    found = timer.read()
    assert all(np.isnan(found[:6]))
    assert found[6:] == (0,) * len(INSIDE)


def test_a_copy_inside_the_computation_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """At depth 2 that is where it lies; every third step has none."""
    world = World(0.0)
    monkeypatch.setattr(FakeEvent, "world", world, raising=False)
    monkeypatch.setattr(cuda.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(cuda.time, "perf_counter", world.perf_counter)
    clock = cuda.CudaClock("compute")  # type: ignore[arg-type]
    timers = [cuda.CudaTimer(clock, world.streams, Late()) for _ in range(2)]  # type: ignore[arg-type]
    truths: list[tuple[float, ...]] = []
    for step in range(10):
        timer = timers[step % 2]
        world.reached = {"h2d": world.now + 1e-6, "compute": world.now + 1e-3, "d2h": world.now + 2.1e-3}
        copied = np.nan
        if step % 3:
            timer.around(H2D, lambda: None)()
            copied = world.now + 1e-6
        timer.around(COMPUTE, lambda: world.reached.update(compute=world.now + 2e-3))()
        timer.around(D2H, lambda: None)()
        truth = (copied, copied, world.now + 1e-3, *(world.now + 2e-3,) * 2, world.now + 2.1e-3)
        truths.append(truth)
        if step:
            now, world.now = world.now, truths[step - 1][5] + 1e-5
            assert timers[(step - 1) % 2].read()[:6] == pytest.approx(truths[step - 1], abs=30e-6, nan_ok=True)
            world.now = now
        world.now += 1e-3
