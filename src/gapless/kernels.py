"""What all Triton kernels share: how they are launched.

Programmatic dependent launch lets a kernel come in while the one before it still runs; a kernel that is launched so
waits (`gdc_wait`) before it touches memory, and says (`gdc_launch_dependents`) from when on the next may come.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def early() -> dict[str, Any]:
    """Launch arguments of a kernel that has the two calls: on where the GPU knows them (Hopper and later)."""
    known = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
    return {"EARLY": True, "launch_pdl": True} if known else {"EARLY": False}
