"""How many replicas a load needs: the rule of `--autoscale`.

    wanted = unfinished requests / (FULL * rows of an engine), rounded up, within the limits
    target = the largest number that was wanted within the last CALM_S seconds

So replicas are added at once, and removed when the load has been lower for CALM_S.
"""

from __future__ import annotations

import math
from collections import deque

FULL = 0.75  # share of an engine's rows that may be taken before a further engine is wanted
CALM_S = 60.0


class Autoscaler:
    """The rule, told the load from time to time."""

    def __init__(self, least: int, most: int, calm_s: float = CALM_S) -> None:
        self.least, self.most = least, most
        self._calm_s = calm_s
        self._wanted: deque[tuple[float, int]] = deque()  # time and number; falling numbers

    def target(self, now_s: float, num_unfinished: int, num_rows: int) -> int:
        """num_rows: of one engine; 0 while none is known."""
        wanted = math.ceil(num_unfinished / (FULL * num_rows)) if num_rows else 0
        wanted = min(max(wanted, self.least), self.most)
        while self._wanted and self._wanted[-1][1] <= wanted:
            self._wanted.pop()
        self._wanted.append((now_s, wanted))
        while self._wanted[0][0] < now_s - self._calm_s:
            self._wanted.popleft()
        return self._wanted[0][1]
