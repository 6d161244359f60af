"""What a layer asks of attention, as the kernels take it. A value; knows no kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Scale, window and soft cap of one layer's scores, and the units of its KV cache."""

    scale: float  # for powers of two, and for keys as the cache has them
    window: int = 0  # positions that a token sees; 0: all of them
    soft_cap: float = 0.0  # 0: none
    k_unit: float = 1.0  # what a 1 in the cache stands for; counts in a cache of FP8 alone
    v_unit: float = 1.0

    def constants(self, *, has_sinks: bool) -> dict[str, Any]:
        """Arguments that kernels are compiled for."""
        return {"WINDOW": self.window, "SOFT_CAP": self.soft_cap, "HAS_SINKS": has_sinks}
