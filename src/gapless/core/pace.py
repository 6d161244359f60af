"""How many tokens a step may have, so that it ends in time.

A long step delays every stream of its batch. A prompt is therefore split into chunks by time and not by tokens alone:
each step with chunks gives a rate, and the rate gives the next budget.

    the step was too slow               the budget becomes the size that would have been in time
    it was in time and used the budget  the budget grows, at most fourfold
    it was in time with fewer tokens    the budget stays

Knows plans and a clock. The time of a step runs from its plan, or from the end of the step before it, to its commit.
That is the time that a client sees between two tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from gapless.core.plan import Plan

FIRST_TOKENS = 128  # before any step was timed
LEAST_TOKENS = 64  # of a step's chunks: below this the fixed cost of a step outweighs the tokens
MOST_GROWTH = 4


class Pace:
    """Learns from the steps how many tokens fit into the target."""

    def __init__(self, target_s: float, max_tokens: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """target_s: the longest time that a step should take; `math.inf` is no limit."""
        self.target_s = target_s
        self.num_tokens = max_tokens if math.isinf(target_s) else min(FIRST_TOKENS, max_tokens)
        self._max_tokens = max_tokens
        self._clock = clock
        self._planned_s: dict[int, float] = {}  # of steps that are not over
        self._last_end_s = -math.inf

    def chunk_tokens(self, num_decodes: int) -> int:
        """Prompt tokens for a step that already has this many decode rows."""
        return max(self.num_tokens - num_decodes, LEAST_TOKENS)

    def begin(self, plan: Plan) -> None:
        """A step was planned."""
        self._planned_s[plan.step] = self._clock()

    def end(self, plan: Plan) -> None:
        """The step has come back."""
        now = self._clock()
        spent_s = now - max(self._planned_s.pop(plan.step, now), self._last_end_s)
        self._last_end_s = now
        if plan.chunks and spent_s > 0:
            self._adapt(plan.num_tokens, spent_s)

    def _adapt(self, num_tokens: int, spent_s: float) -> None:
        in_time = int(min(num_tokens * self.target_s / spent_s, self._max_tokens))
        if spent_s > self.target_s:
            self.num_tokens = max(1, min(self.num_tokens, in_time))
        elif 2 * num_tokens >= self.num_tokens:
            self.num_tokens = max(self.num_tokens, min(in_time, MOST_GROWTH * self.num_tokens))
