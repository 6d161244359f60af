"""Chooses how many steps may be in flight, by trying.

A fixed depth is what the user asked for. "auto" times decode steps of an unchanging batch at each candidate depth, a
few rounds in turn so that drift hits all alike, and stays with the fastest. Until it has decided it uses what it tries.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from gapless.core.plan import Plan

STEPS_A_ROUND = 7  # with two depths and two rounds: decided after 28 steps, so that a job of 64 tokens is
SETTLING_STEPS = 2  # of each round, not counted: the pipeline still has the previous depth's shape
NUM_ROUNDS = 2


class FixedDepth:
    """The depth that was asked for."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.decided = True
        self.num_reduced = 0

    def observe(self, plan: Plan) -> None:
        """A step was launched."""


class AutoDepth:
    """Tries candidate depths on live traffic, then keeps the fastest."""

    def __init__(self, candidates: tuple[int, ...], clock: Callable[[], float] = time.perf_counter) -> None:
        self.depth = candidates[0]
        self.decided = False
        self.num_reduced = 0  # times that it went to a smaller depth
        self._candidates = candidates
        self._clock = clock
        self._times: dict[int, list[float]] = {depth: [] for depth in candidates}
        self._turn = 0
        self._num_steps = 0
        self._last: tuple[int, float] | None = None  # batch size and launch time of the previous step

    def observe(self, plan: Plan) -> None:
        """A step was launched. Only pure decode steps of the same size as the one before are timed."""
        if self.decided:
            return
        now = self._clock()
        previous, self._last = self._last, (plan.num_decodes, now)
        if plan.chunks or previous is None or previous[0] != plan.num_decodes:
            self._num_steps = 0
            return
        self._num_steps += 1
        if self._num_steps > SETTLING_STEPS:
            self._times[self.depth].append((now - previous[1]) / plan.num_decodes)
        if self._num_steps == STEPS_A_ROUND:
            self._next_turn()

    def _next_turn(self) -> None:
        self._turn += 1
        self._num_steps = 0
        before = self.depth
        self.depth = self._candidates[self._turn % len(self._candidates)]
        if self._turn == NUM_ROUNDS * len(self._candidates):
            self.depth = min(self._candidates, key=lambda depth: statistics.median(self._times[depth]))
            self.decided = True
        self.num_reduced += self.depth < before
