"""What all Triton kernels share: how they are launched, and what the GPU has room for.

Programmatic dependent launch lets a kernel come in while the one before it still runs; a kernel that is launched so
waits (`gdc_wait`) before it touches what that one writes, and says (`gdc_launch_dependents`) from when on the next may
come. What nobody writes, weights above all, it may ask for before it waits. A kernel may run ahead of several others,
but not of one that is launched as usual, nor of the step before. That is why attention may read rows, lengths and
blocks before it waits: after the kernel that begins the step, one that is launched as usual gathers rope's angles.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

HOPPER = 9


@cache
def generation() -> int:
    """The GPU's, as NVIDIA counts them; 0: there is none."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0


@cache
def early() -> dict[str, Any]:
    """Launch arguments of a kernel that has the two calls: on where the GPU knows them (Hopper and later)."""
    return {"EARLY": True, "launch_pdl": True} if generation() >= HOPPER else {"EARLY": False}


@cache
def shared_memory_bytes() -> int | None:
    """What a program may take of a core's shared memory; None: no GPU, no limit."""
    if not torch.cuda.is_available():
        return None
    driver = triton.runtime.driver.active
    return int(driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"])


@triton.jit
def in_turn(EARLY: tl.constexpr):
    """Let the next kernel come in, and wait for the one before: all of a short kernel's part in it."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(address, size):
    """Have memory brought into the second-level cache: `size` bytes, a multiple of 16, from each address."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [address, size],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
