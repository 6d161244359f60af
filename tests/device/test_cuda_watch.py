"""Idle time between launches, with a device whose clock the test moves: what is found is what was left empty."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from gapless.device import cuda, cuda_watch
from gapless.device.base import ALLOCATION, COMPILE, COMPUTE, LAUNCH
from gapless.device.cuda_watch import LaunchWatch
from gapless.device.late import Late


@dataclass
class World:
    """A host that takes time, and a stream that works through what was launched."""

    now: float = 0.0
    free_at: float = 0.0  # when the stream has done everything
    hooks: list[Callable[[Any], None]] = field(default_factory=list)

    def perf_counter(self) -> float:
        return self.now

    def launch(self, took: float) -> None:
        """A kernel: Triton calls the hooks around it."""
        self.hooks[0](None)
        self.free_at = max(self.free_at, self.now) + took
        self.hooks[1](None)


class MovedEvent:
    world: World

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: str) -> None:
        self.moment = max(self.world.free_at, self.world.now)

    def query(self) -> bool:
        return self.moment <= self.world.now

    def elapsed_time(self, other: MovedEvent) -> float:
        assert other.query()
        return (other.moment - self.moment) * 1e3


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    found = World()

    class Hooks:
        def __init__(self, *hooks: Callable[[Any], None]) -> None:
            found.hooks = list(hooks)

        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            found.hooks = []

    monkeypatch.setattr(MovedEvent, "world", found, raising=False)
    monkeypatch.setattr(cuda.torch.cuda, "Event", MovedEvent)
    monkeypatch.setattr(cuda_watch.time, "perf_counter", found.perf_counter)
    monkeypatch.setattr(cuda_watch, "around_launches", Hooks)
    return found


def read(world: World, watch: LaunchWatch) -> dict[int, float]:
    world.now = max(world.now, world.free_at)
    return {cause: pytest.approx(seconds) for cause, seconds in enumerate(watch.read()) if seconds > 0}


def test_a_host_that_comes_late_leaves_the_device_idle(world: World) -> None:
    watch = LaunchWatch("compute", Late())  # type: ignore[arg-type]
    with watch.on():
        world.launch(0.010)
        world.now += 0.040  # 30 ms longer than the kernel
        world.launch(0.010)
        world.now += 0.004  # still at work
        world.launch(0.010)
    assert read(world, watch) == {LAUNCH: 0.030}
    assert read(world, watch) == {}  # forgotten


def test_a_device_that_has_work_does_not_wait(world: World) -> None:
    watch = LaunchWatch("compute", Late())  # type: ignore[arg-type]
    with watch.on():
        for _ in range(100):
            world.launch(1e-3)
            world.now += 1e-5
    assert len(watch._stretches) == 1  # before the first launch: of no length
    assert read(world, watch) == {}


def test_the_time_before_the_first_launch_and_after_the_last_counts(world: World) -> None:
    watch = LaunchWatch("compute", Late())  # type: ignore[arg-type]
    with watch.on():
        world.now += 0.002
        world.launch(0.001)
        world.now += 0.004
    assert read(world, watch) == {LAUNCH: 0.005}


def test_a_stretch_has_the_cause_of_what_the_host_did_in_it(world: World) -> None:
    late, num_allocated = Late(), [3]
    late.watch_allocations(lambda: num_allocated[0])
    late.ready()
    watch = LaunchWatch("compute", late)  # type: ignore[arg-type]
    with watch.on():
        world.launch(0.001)
        late.compiled("product", 0.5, cached=False)
        late.loaded("product")
        world.now += 0.501
        world.launch(0.001)
        num_allocated[0] += 1
        world.now += 0.021
        world.launch(0.001)
        world.now += 0.003
        world.launch(0.001)
    assert read(world, watch) == {COMPILE: 0.500, ALLOCATION: 0.020, LAUNCH: 0.002}


def test_an_operation_that_holds_the_host_counts_up_to_its_own_time(world: World) -> None:
    """Memory is taken, or a library is loaded, within the call, and only then comes the kernel."""
    late, num_allocated = Late(), [3]
    late.watch_allocations(lambda: num_allocated[0])
    late.ready()
    watch = LaunchWatch("compute", late)  # type: ignore[arg-type]
    with watch.on():
        watch.before()
        num_allocated[0] += 1
        world.now += 0.020
        world.free_at = world.now + 0.5
        watch.after()
    assert read(world, watch) == {ALLOCATION: 0.020}


def test_a_host_that_waits_for_room_in_the_queue_is_not_late(world: World) -> None:
    watch = LaunchWatch("compute", Late())  # type: ignore[arg-type]
    with watch.on():
        world.launch(1.0)
        watch.before()
        world.now += 0.5
        world.free_at += 0.3
        watch.after()
    assert read(world, watch) == {}


def test_operations_of_torch_are_launches_unless_they_only_look(world: World) -> None:
    watch = LaunchWatch("compute", Late())  # type: ignore[arg-type]
    with watch.on():
        x = torch.empty(4)
        num_marks = len(watch._used)
        x = x.view(2, 2)[:1].t()
        assert len(watch._used) == num_marks
        x.add(1)
        assert len(watch._used) > num_marks


def test_watching_loads_nothing_more_of_torch() -> None:
    """Its first use, in a step, would take seconds."""
    code = (
        "import sys, torch; from gapless.device.cuda_watch import _Operations; calls = []\n"
        "with _Operations(lambda: calls.append(1), lambda: None): torch.zeros(4).add_(1)\n"
        "sys.exit(0 if calls and 'torch._dynamo' not in sys.modules else 1)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_launches_of_other_threads_are_not_seen(world: World) -> None:
    watch = LaunchWatch("compute", Late())  # type: ignore[arg-type]
    with watch.on():
        world.now += 0.002
        num_marks = len(watch._used)
        thread = threading.Thread(target=lambda: world.launch(0.001))
        thread.start()
        thread.join()
        assert len(watch._used) == num_marks


def test_marks_are_used_again(world: World) -> None:
    watch = LaunchWatch("compute", Late())  # type: ignore[arg-type]
    for _ in range(5):
        with watch.on():
            for _ in range(10):
                world.launch(1e-3)
                world.now += 2e-3
        assert read(world, watch) == {LAUNCH: 10e-3}
    assert len(watch._free) == 22


def test_a_step_is_watched_while_its_timer_runs_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "ANCHOR_TRIES", 1)
    monkeypatch.setattr(MovedEvent, "synchronize", lambda event: None, raising=False)
    clock = cuda.CudaClock("compute")  # type: ignore[arg-type]
    timer = cuda.CudaTimer(clock, ("h2d", "compute", "d2h"), Late())  # type: ignore[arg-type]
    device = cuda.CudaDevice.__new__(cuda.CudaDevice)
    device._clock = clock

    @device.as_launch
    def foreign(took: float) -> None:
        """Work that nobody else reports."""
        world.free_at = max(world.free_at, world.now) + took

    def step() -> None:
        with device.watch():
            world.launch(0.001)
            world.now += 0.031
            world.launch(0.001)
            foreign(0.010)
            world.now += 0.011
            foreign(0.010)

    timer.around(COMPUTE, step)()
    with device.watch():  # nobody times this
        assert world.hooks == []
    foreign(0.0)
    world.now = 1.0
    timer.around(2, lambda: None)()
    *_, begin, end, _, _, launch, compiling, allocation, masks = timer.read()
    assert (end - begin, launch) == (pytest.approx(0.052), pytest.approx(0.030))
    assert (compiling, allocation, masks) == (0, 0, 0)
