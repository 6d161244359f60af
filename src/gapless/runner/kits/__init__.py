"""One kit a kind of device. `kit_for` is the one place that knows which kits there are."""

from __future__ import annotations

from gapless.runner.kits.base import Kit


def kit_for(name: str) -> Kit:
    """The kit of the device that `pick_device` named. Only this kit is imported: CUDA's needs Triton."""
    return KITS[name]()


def _cpu() -> Kit:
    from gapless.runner.kits.cpu import CpuKit

    return CpuKit()


def _cuda() -> Kit:
    from gapless.runner.kits.cuda import CudaKit

    return CudaKit()


KITS = {"cpu": _cpu, "cuda": _cuda}
