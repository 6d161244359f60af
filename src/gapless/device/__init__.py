"""How order is expressed. Only `open_device` knows which devices there are."""

from __future__ import annotations

from gapless.device.base import Device
from gapless.errors import ConfigError


def pick_device(name: str) -> str:
    """The device that `name` means on this machine: itself, or the best one for "auto"."""
    from gapless.device import cuda

    if name == "auto":
        return "cuda" if cuda.is_available() else "cpu"
    if name == "cuda" and not cuda.is_available():
        raise ConfigError("device cuda: torch finds no NVIDIA GPU here; use device cpu or auto")
    return name


def open_device(name: str, *, seed: int | None = None, jitter: int | None = None, check: bool = False) -> Device:
    """A device by the name from `pick_device`. With `check`, every overlap on it is checked.

    `seed` chooses the order in which streams run, on a CPU. `jitter` adds random delays, on any device.
    """
    from gapless.device.checker import CheckedDevice
    from gapless.device.jitter import JitterDevice

    if seed is not None and name not in ORDERED:
        raise ConfigError("interleave: the order of streams can be chosen on the CPU device only")
    device = DEVICES[name](seed)
    if jitter is not None:
        device = JitterDevice(device, jitter)
    return CheckedDevice(device) if check else device


def _open_cpu(seed: int | None) -> Device:
    from gapless.device.cpu import CpuDevice

    return CpuDevice(seed=seed)


def _open_cuda(seed: int | None) -> Device:
    from gapless.device.cuda import CudaDevice

    return CudaDevice()


DEVICES = {"cpu": _open_cpu, "cuda": _open_cuda}
ORDERED = ("cpu",)  # devices on which a seed chooses the order of streams
