"""Which log-probabilities a step is asked for, and which request gets those that come back.

Only the scheduler calls this. Reads rows; the scores of requests are all that it writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gapless.core.plan import NOTHING, Chunk, Plan
from gapless.core.request import IntArray, LongArray, RowTable


class Scoring:
    """The log-probabilities of all rows."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows

    def targets(self, row: int, start: int, end: int) -> tuple[IntArray, int]:
        """Prompt tokens that follow these positions and still lack log-probabilities, and the first such position.

        A row's chunks run in order from a cursor that lies no further than what is known, so that nothing is left out.
        """
        request = self._rows.request[row]
        if request is None or not request.lacks_prompt_scores:
            return NOTHING, 0
        first = max(start, request.num_prompt_scores)
        return request.prompt[first + 1 : end + 1], first

    def wanted(self, samples: LongArray, chunks: Sequence[Chunk]) -> tuple[IntArray, int]:
        """Which samples want log-probabilities, and the largest number of likeliest tokens that a request wants."""
        rows = self._rows
        if rows.num_scoring == 0:
            return NOTHING, 0
        wanted = rows.num_logprobs[samples]
        most = max(int(wanted.max(initial=-1)), 0)
        for chunk in chunks:
            if len(chunk.targets):
                request = rows.request[chunk.row]
                assert request is not None
                most = max(most, request.params.prompt_logprobs or 0)
        return np.flatnonzero(wanted >= 0).astype(np.int32), most

    def keep(self, plan: Plan, live: npt.NDArray[np.bool_], scores: IntArray) -> None:
        """Give each request its own; copies, so that none keeps a whole step's in memory."""
        rows, wanting = self._rows, plan.score_samples
        kept = live[wanting]
        size, content = scores.shape[1] * scores.itemsize, scores[: len(wanting)][kept].tobytes()
        for number, row in enumerate(plan.sample_rows[wanting[kept]].tolist()):
            request = rows.request[row]
            assert request is not None
            request.scores.append(content[number * size : (number + 1) * size])
        end = len(wanting)
        for chunk in plan.chunks:
            start, end = end, end + len(chunk.targets)
            request = rows.request[chunk.row]
            if end > start and request is not None and rows.epoch[chunk.row] == chunk.epoch:
                request.prompt_scores.append(scores[start:end].copy())
