"""What a layer asks of attention's scores, as the kernels take it. A value; knows no kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Scale, window and soft cap of one layer's scores."""

    scale: float  # for powers of two
    window: int = 0  # positions that a token sees; 0: all of them
    soft_cap: float = 0.0  # 0: none

    def constants(self, *, has_sinks: bool) -> dict[str, Any]:
        """Arguments that kernels are compiled for."""
        return {"WINDOW": self.window, "SOFT_CAP": self.soft_cap, "HAS_SINKS": has_sinks}
