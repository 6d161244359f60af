"""Chooses how many steps may be in flight: the depth that was asked for, or by trials on live traffic.

"auto" begins at 2, tries the depth below and the depth above, and then goes on trying a neighbour every few seconds.

    trial    home | rival | rival | home | home | rival | ...    rounds of 20 steps, until one is surely better
    pause    home ..............................................  20 times as long as the trial, at least 5 s

Steps of different sizes are compared by what a step of that size takes in this trial: a straight line through decode
rows and prompt tokens, fitted to all rounds. A deeper rival must be faster, because each further step in flight delays
tokens and computes more of them in vain. A shallower one wins if it is as fast. In doubt everything stays as it is.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gapless.core.plan import Plan

AUTO_DEPTHS = (1, 2, 3)
SETTLING_STEPS = 4  # at the start of a round, not counted: the pipeline still has the previous depth's shape
STEPS_A_ROUND = 16  # counted
LOOKS = (4, 9, 18, 36)  # rounds of each depth after which a trial may end; after the last it ends
HOPELESS = 0.10  # a rival so much slower in its first round loses at once
DEEPER, SHALLOWER = (-0.02, 3.0), (0.01, 2.0)  # most extra time of a rival, and how sure, in standard errors
DOUBT = 0.02  # added to the most extra time, in the worst case that is considered
PAUSE_S, PAUSE_TRIALS = 5.0, 20  # between trials: seconds, and durations of the last one


class FixedDepth:
    """The depth that was asked for."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.decided = True
        self.num_reduced = 0

    def observe(self, plan: Plan) -> None:
        """A step was launched."""


@dataclass(slots=True)
class DepthTrial:
    """Two depths in turn, and the time of every step that counts."""

    home: int
    rival: int
    began_s: float
    steps: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, decode rows, prompt tokens
    num_rounds: int = 0

    @property
    def depth(self) -> int:
        """Of the next round: home, rival, rival, home, and again, so that drift hits both alike."""
        return self.rival if self.num_rounds % 4 in (1, 2) else self.home

    def extra(self) -> list[float]:
        """How much longer the rival took than home, relative, for each pair of rounds."""
        steps = np.array(self.steps)
        sizes = np.column_stack((np.ones(len(steps)), steps[:, 1:]))
        expected = sizes @ np.linalg.lstsq(sizes, steps[:, 0], rcond=None)[0]
        expected = np.maximum(expected, 0.1 * steps[:, 0].mean())
        spent, due = (column.reshape(-1, 2, STEPS_A_ROUND).sum(axis=2) for column in (steps[:, 0], expected))
        pace = np.log(spent / due)  # [num_pairs, 2]; in every other pair the rival comes first
        return [float((b - a) * (-1) ** number) for number, (a, b) in enumerate(pace)]

    def verdict(self) -> bool | None:
        """Whether the rival wins; None while that is open."""
        num_pairs, has_half = divmod(self.num_rounds, 2)
        if has_half or num_pairs not in (1, *LOOKS):
            return None
        extra = self.extra()
        mean = sum(extra) / num_pairs
        if num_pairs == 1:
            return False if mean > HOPELESS else None
        wanted, sure = DEEPER if self.rival > self.home else SHALLOWER
        error = sure * math.sqrt(sum((x - mean) ** 2 for x in extra) / (num_pairs - 1) / num_pairs)
        if mean < wanted and mean + error < wanted + DOUBT:
            return True
        return False if mean - error > wanted or num_pairs == LOOKS[-1] else None


class AutoDepth:
    """Keeps the best depth known, its home, and tries the neighbours again and again."""

    def __init__(
        self, candidates: tuple[int, ...] = AUTO_DEPTHS, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.depth = self._home = candidates[len(candidates) // 2]
        self.decided = False  # not during a trial, and not until each neighbour was tried once
        self.num_reduced = 0  # times that a smaller depth won
        self._candidates = candidates
        self._clock = clock
        self._untried = self._neighbours()
        self._has_tried = False  # each neighbour once
        self._last_rival = 0
        self._trial: DepthTrial | None = None
        self._next_s = -math.inf  # of the next trial
        self._num_steps = 0  # of the round
        self._sizes: deque[tuple[int, int]] = deque(maxlen=max(candidates) + 1)  # of the last steps
        self._last_s = 0.0

    def observe(self, plan: Plan) -> None:
        """A step was launched."""
        now = self._clock()
        spent_s, self._last_s = now - self._last_s, now
        if self._trial is None:
            if now >= self._next_s and plan.num_decodes:
                self._begin(now)
        elif plan.num_decodes == 0:  # there may have been nothing to run, so times mean nothing
            self._end(self._trial, now, None)
        else:
            self._count(self._trial, plan, spent_s, now)

    def _neighbours(self) -> list[int]:
        return [depth for depth in self._candidates if abs(depth - self._home) == 1]

    def _begin(self, now: float) -> None:
        if not self._untried:  # then again, the one whose turn it is
            self._untried = sorted(self._neighbours(), key=lambda depth: depth == self._last_rival)[:1]
        self._last_rival = self._untried[0]
        self._trial = DepthTrial(self._home, self._last_rival, now)
        self.decided = False
        self._num_steps = 0
        self._sizes.clear()

    def _count(self, trial: DepthTrial, plan: Plan, spent_s: float, now: float) -> None:
        """Between two launches the loop waited for the step launched `depth` steps ago."""
        self._sizes.append((plan.num_decodes, plan.num_tokens - plan.num_decodes))
        self._num_steps += 1
        if self._num_steps > SETTLING_STEPS:
            trial.steps.append((spent_s, *self._sizes[-1 - self.depth]))
        if self._num_steps < SETTLING_STEPS + STEPS_A_ROUND:
            return
        self._num_steps = 0
        trial.num_rounds += 1
        self.depth = trial.depth
        if (won := trial.verdict()) is not None:
            self._end(trial, now, won)

    def _end(self, trial: DepthTrial, now: float, won: bool | None) -> None:
        """The trial is over; None: without a result."""
        if won:
            self.num_reduced += trial.rival < self._home
            self._home, self._untried = trial.rival, []
        elif won is False:
            self._untried.remove(trial.rival)
        self.depth, self._trial = self._home, None
        self._has_tried = self.decided = self._has_tried or not self._untried
        self._next_s = now
        if won is None or self.decided:
            self._next_s += max(PAUSE_S, PAUSE_TRIALS * (now - trial.began_s))
