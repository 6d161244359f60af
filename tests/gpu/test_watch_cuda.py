"""Idle time within steps, and first times after ready, on a real GPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
FRESH = itertools.count(time.time_ns() % 2**30)  # values that no cache of kernels has seen


@triton.jit
def _add(x, value: tl.constexpr):
    tl.store(x + tl.program_id(0), tl.load(x + tl.program_id(0)) + value)


@pytest.fixture
def device() -> Iterator[Any]:
    from gapless.device.cuda import CudaDevice

    found = CudaDevice()
    yield found
    found.close()


def times_of(device: Any, step: Callable[[], None]) -> tuple[float, ...]:
    """A step through its timer, watched: how long it took, then its idle time by cause."""
    timer = device.timer()

    def watched() -> None:
        with device.watch():
            step()

    device.stream("compute").run(timer.around(1, watched), "compute 1")
    device.stream("d2h").run(timer.around(2, lambda: None), "copy out 1")
    torch.cuda.synchronize()
    times = timer.read()
    return times[3] - times[2], *times[6:]


@pytest.mark.parametrize("kind", ["triton", "torch"])
def test_a_sleep_between_two_kernels_is_found(device: Any, kind: str) -> None:
    x = torch.zeros(64, device="cuda")
    launch = (lambda: _add[(64,)](x, 1)) if kind == "triton" else (lambda: x.add_(1))
    launch()

    def step() -> None:
        launch()
        time.sleep(0.030)
        launch()

    times_of(device, step)
    took, waited, compiling, allocation, _ = times_of(device, step)
    assert waited == pytest.approx(0.030, rel=0.05)
    assert took - waited < 0.002
    assert (compiling, allocation) == (0, 0)


def test_a_device_with_work_to_do_does_not_idle(device: Any) -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.mm(x, x)

    def step() -> None:
        for _ in range(50):
            torch.mm(x, x)
        time.sleep(0.003)  # shorter than the products
        torch.mm(x, x)

    times_of(device, step)
    took, *idle = times_of(device, step)
    assert took > 0.005
    assert sum(idle) < 0.05 * took


def test_a_compilation_within_a_step_is_found_and_counted(device: Any) -> None:
    x = torch.zeros(64, device="cuda")
    _add[(64,)](x, 1)
    device.late.ready()
    value = next(FRESH)
    began = time.perf_counter()
    times_of(device, lambda: (x.add_(1), None)[-1])
    took, waited, compiling, *_ = times_of(device, lambda: (x.add_(1), _add[(64,)](x, value), None)[-1])
    assert compiling > 0.8 * took
    assert compiling + waited <= time.perf_counter() - began
    ledger = device.late.ledger()
    assert (ledger["after ready: compiled _add"], ledger["after ready: loaded _add"]) == (1, 1)
    assert any(note.startswith("compute 1: compiled _add") for note in device.late.notes)


def test_an_allocation_within_a_step_is_found_and_counted(device: Any) -> None:
    x = torch.zeros(64, device="cuda")
    torch.cuda.empty_cache()
    device.late.ready()
    kept: list[Any] = []

    def step() -> None:
        x.add_(1)
        kept.append(torch.empty(2**31, dtype=torch.uint8, device="cuda"))
        x.add_(1)

    took, waited, _, allocation, _ = times_of(device, step)
    assert device.late.ledger()["after ready: device allocation"] >= 1
    assert "compute 1: device allocation" in device.late.notes
    assert allocation > waited
    assert allocation <= took


def test_the_cost_of_watching_is_bounded(device: Any) -> None:
    """A step of 300 kernels, as the host sees it."""
    x = torch.zeros(64, device="cuda")
    _add[(64,)](x, 1)

    def step() -> None:
        for _ in range(300):
            _add[(64,)](x, 1)

    def seconds(fn: Callable[[], None]) -> float:
        best = []
        for _ in range(5):
            began = time.perf_counter()
            fn()
            best.append(time.perf_counter() - began)
            torch.cuda.synchronize()
            reading = time.perf_counter()
            timer.watch.read()  # so that marks are used again
            print(f"read in {(time.perf_counter() - reading) * 1e6:.0f} us")
        return min(best)

    timer = device.timer()

    def watched() -> None:
        with device.watch():
            step()

    with torch.cuda.stream(device.stream("compute").inner):
        plain = seconds(step)
        with_watch = seconds(timer.around(1, watched))
    print(f"300 launches: {plain * 1e6:.0f} us, watched {with_watch * 1e6:.0f} us")
    assert with_watch - plain < 300 * 15e-6
