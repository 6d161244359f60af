"""Kernels compiled ahead for a GPU that is not there: a driver that compiles for Hopper and counts what it launches.

`main` is run by test_ahead in a process without Triton's interpreter. It prints what happened, as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from gapless.device import kernel_hooks
from gapless.device.late import Late
from gapless.kernels.ahead import KernelNotCompiled, compiled_ahead
from gapless.kernels.compilers import Compilers


class Utils:
    """Loads nothing."""

    def load_binary(self, name: str, *others: Any) -> tuple[int, ...]:
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def unload_module(self, module: int) -> None:
        pass


class Driver:
    """A Hopper GPU, for the compiler."""

    utils = Utils()
    launched: list[str] = []  # noqa: RUF012

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *args: self.launched.append(source.name)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@triton.jit
def add(x, value: tl.constexpr):
    tl.store(x, tl.load(x) + value)


@triton.jit
def copy(x, y):
    tl.store(y, tl.load(x))


@triton.jit
def wrong(x, value: tl.constexpr):
    tl.static_assert(value < 0, "no such value")


def step(x: torch.Tensor) -> torch.Tensor:
    """Returns memory that a kernel would have written."""
    index = torch.empty(4, dtype=torch.int64)
    copy[(1,)](x, index)
    for value in (1, 2, 1, 2):
        add[(1,)](x, value)
    return index


def rehearsed(compilers: Compilers, late: Late) -> dict[str, Any]:
    x, progress = torch.zeros(4), list[tuple[int, int]]()
    elsewhere = threading.Event()
    with compiled_ahead(compilers, lambda done, found: progress.append((done, found))) as ahead:
        found = torch.arange(8)[step(x)]
        thread = threading.Thread(target=lambda: (copy[(1,)](x, x), elsewhere.set()))
        thread.start()  # launches as always
        thread.join()
    before, compiled = list(Driver.launched), late.built["compiled"]
    step(x)
    return {
        "names": ahead.names,
        "compiled_elsewhere": [variant.compiled_elsewhere for variant in ahead._found],
        "seconds": ahead.seconds,
        "found": found.tolist(),
        "progress": progress,
        "elsewhere": elsewhere.is_set(),
        "launched_within": before,
        "launched_after": Driver.launched[len(before) :],
        "compiled": compiled,
        "found_in_cache": late.built["found in the cache"],
        "compiled_later": late.built["compiled"] - compiled,
        "loaded": late.built["loaded"],
    }


def refused(compilers: Compilers) -> list[str]:
    """What is said of a kernel that cannot be compiled; and a second time, with the same kernel."""
    said = []
    for _ in range(2):
        try:
            with compiled_ahead(compilers):
                add[(1,)](torch.zeros(4), 1)
                wrong[(1,)](torch.zeros(4), 3)
        except KernelNotCompiled as error:
            said.append(str(error))
    return said


def interrupted(compilers: Compilers) -> list[Any]:
    """After an error in the block, launches run again, and compile what they need."""
    try:
        with compiled_ahead(compilers):
            for value in range(10, 14):
                add[(1,)](torch.zeros(4), value)
            raise KeyError("mine")
    except KeyError as error:
        said = repr(error)
    before = len(Driver.launched)
    add[(1,)](torch.zeros(4), 13)
    return [said, Driver.launched[before:]]


def two_at_once(compilers: Compilers) -> list[Any]:
    """A second block, on a thread of its own, that begins while the first runs and ends after it."""
    began = threading.Event()

    def second() -> None:
        began.set()
        with compiled_ahead(compilers):
            add[(1,)](torch.zeros(4), 21)
            first_is_over.wait(5)

    thread, first_is_over = threading.Thread(target=second), threading.Event()
    with compiled_ahead(compilers):
        add[(1,)](torch.zeros(4), 20)
        thread.start()
        began.wait()
        time.sleep(0.2)
    first_is_over.set()
    thread.join()
    before = len(Driver.launched)
    for value in (20, 21):
        add[(1,)](torch.zeros(4), value)
    return Driver.launched[before:]


def main(*, only_rehearsed: bool = False, few: int = 0) -> None:
    driver.set_active(Driver())
    late = Late()
    kernel_hooks.listen(late)
    with Compilers(2, few) as compilers:
        told: dict[str, Any] = {"rehearsed": rehearsed(compilers, late)}
        if not only_rehearsed:
            told |= {"refused": refused(compilers), "interrupted": interrupted(compilers)}
            told["two_at_once"] = two_at_once(compilers)
        told["traced"] = "torch._dynamo" in sys.modules
        told["started"] = compilers._process is not None
    json.dump(told, sys.stdout)
