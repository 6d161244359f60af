"""A shaken device does the same work in the same order, later."""

from __future__ import annotations

import pytest

from gapless.device import open_device
from gapless.device.checker import CheckedDevice
from gapless.device.cpu import CpuDevice
from gapless.device.jitter import JitterDevice
from toy import run_on, toy_requests, toy_truth


@pytest.mark.parametrize("depth", [1, 3])
def test_tokens_do_not_depend_on_delays(depth: int) -> None:
    truth = {request.id: toy_truth(request) for request in toy_requests()}
    for seed in range(2):
        device = CheckedDevice(JitterDevice(CpuDevice(), seed))
        assert run_on(device, toy_requests(), depth=depth).tokens == truth


def test_delays_are_queued_on_the_stream_and_not_on_the_host() -> None:
    device = CpuDevice()
    over = device.event("over")
    device.stream("compute").pause(0.2)
    device.stream("compute").record(over)
    assert not over.query()
    over.synchronize()
    device.close()


def test_any_device_can_be_shaken_by_name() -> None:
    device = open_device("cpu", jitter=3, check=True)
    assert isinstance(device, CheckedDevice)
    assert isinstance(device._inner, JitterDevice)
    device.close()
