"""Requests that are kept out of plans for a while, each with the reason.

A row may have to wait for something that is not on the device yet. It keeps its row and its blocks, steps in flight for
it come back as usual, and it costs a plan nothing. Every plan that goes without it is counted under the reason.
Only the scheduler calls this.
"""

from __future__ import annotations

from collections import Counter

from gapless.core.request import Request, RowTable


class Holds:
    """The held requests, and how many plans went without them."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._reasons: dict[str, str] = {}  # by request
        self.counts: Counter[str] = Counter()  # plans that a held request was not part of, by reason

    def __contains__(self, request: Request) -> bool:
        return request.id in self._reasons

    def __len__(self) -> int:
        return len(self._reasons)

    def hold(self, request: Request, reason: str) -> None:
        """Keep it out of plans. Held again, it has the new reason."""
        self._reasons[request.id] = reason
        if request.row >= 0:
            self._rows.ceiling[request.row] = 0

    def release(self, request: Request) -> None:
        """It may run again. Nothing happens to a request that is not held."""
        if self._reasons.pop(request.id, None) is not None and request.row >= 0:
            self._rows.ceiling[request.row] = request.limit

    def count_plan(self) -> None:
        """A plan was made without them."""
        self.counts.update(self._reasons.values())
