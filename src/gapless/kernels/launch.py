"""Common to all kernels: programmatic dependent launch (PDL), prefetches, and the limits of the GPU.

With PDL a kernel is launched while the one before it still runs. It waits (`gdc_wait`) before it touches what that one
writes, and triggers (`gdc_launch_dependents`) the launch of the next one. Before it waits it may prefetch what no
kernel writes, weights above all. A kernel may run ahead of several others, but not of one that is launched without PDL,
nor of the step before. Attention relies on that: it reads rows, lengths and blocks before it waits, because the kernel
that gathers rope's angles, after the one that begins the step, is launched without PDL.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
import triton
import triton.language as tl

AMPERE, HOPPER = 8, 9


@cache
def generation() -> int:
    """The major compute capability of the GPU; 0: there is none."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0


@cache
def has_fp8() -> bool:
    """Whether the GPU multiplies numbers of 8 bits: from Ada on."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@cache
def pdl() -> dict[str, Any]:
    """Launch arguments of a kernel that has the two calls: PDL is on from Hopper on."""
    return {"PDL": True, "launch_pdl": True} if generation() >= HOPPER else {"PDL": False}


def gluon_kernels(name: str) -> Any:
    """A module of this folder whose kernels are in Gluon; None where this Triton has not what it needs.

    Gluon is experimental: its names come and go, so the module may fail while it is loaded.
    """
    try:
        return import_module(f"gapless.kernels.{name}")
    except (ImportError, AttributeError):
        return None


@cache
def shared_memory_bytes() -> int | None:
    """Shared memory that a program may take; None: no GPU, no limit."""
    if not torch.cuda.is_available():
        return None
    driver = triton.runtime.driver.active
    return int(driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"])


def beside(first: Callable[[], object], second: Callable[[], object]) -> None:
    """Launch both to run at the same time, the first one on a stream of its own; what follows waits for both."""
    if not torch.cuda.is_available():
        first()
        second()
        return
    here, side = torch.cuda.current_stream(), _side_stream()
    fork, join = _events(here)
    fork.record(here)
    side.wait_event(fork)
    torch.cuda.set_stream(side)  # a context, and events made each time, would cost as much as both launches
    try:
        first()
    finally:
        torch.cuda.set_stream(here)
    second()
    join.record(side)
    here.wait_event(join)


@cache
def _side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@cache
def _events(stream: torch.cuda.Stream) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """For each stream its own: two threads may launch at the same time. Each is waited for before it is used again."""
    return torch.cuda.Event(), torch.cuda.Event()


@triton.jit
def launch_dependents_and_wait(PDL: tl.constexpr):
    """Trigger the next kernel's launch, then wait for the one before: all that a short kernel does about PDL."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(address, size):
    """Prefetch `size` bytes, a multiple of 16, from each address into the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [address, size],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
