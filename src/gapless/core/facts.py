"""Turns what a step sampled into facts: tokens of requests, and requests that are over.

A row may have been promised several samples and bring fewer. What was promised too much is taken back first; then the
samples are settled one of each row at a time, so that a stop among them ends the request where it stands. A token that
must come is a fact before its sample is back, and the sample then counts for nothing. Only the scheduler calls this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from gapless.core.outcome import Commit, Counters, Finished, Progress, joined, not_finite, progress_of
from gapless.core.plan import NO_MORE, Plan, score_width
from gapless.core.prefix_sharing import PrefixSharing
from gapless.core.request import IntArray, LongArray, Request, RowTable
from gapless.core.scoring import Scoring

Finish = Callable[[Request, str, BaseException | None], Finished]
Samples = tuple[IntArray, LongArray, IntArray]  # rows, their epochs in the plan, one token of each


class Facts:
    """Writes what is known of the rows."""

    def __init__(
        self, rows: RowTable, sharing: PrefixSharing, scoring: Scoring, counters: Counters, finish: Finish
    ) -> None:
        self._rows = rows
        self._sharing = sharing
        self._scoring = scoring
        self._counters = counters
        self._finish = finish

    def settle(self, plan: Plan, results: IntArray) -> Commit:
        """The plan's slots hold the samples of its rows in order; the plan's scores follow."""
        num_slots = plan.num_slots
        if plan.num_scores:
            live = self._rows.epoch[plan.sample_rows] == plan.sample_epochs
            self._scoring.keep(plan, live, results[num_slots:].reshape(-1, score_width(plan.num_top)))
        if len(plan.decode_widths) == 0:
            return self._settle_one_each(plan.sample_rows, plan.sample_epochs, results[:num_slots])
        return joined([self._settle_one_each(*samples) for samples in self._rounds(plan, results[:num_slots])])

    def _rounds(self, plan: Plan, slots: IntArray) -> Iterator[Samples]:
        """The first sample of each row, then the second of those that have one, and so on."""
        widths = plan.sample_widths
        starts = np.cumsum(widths) - widths
        has = np.arange(widths.max()) < widths[:, None]  # [num_samples, widest]
        ragged = np.full(has.shape, NO_MORE, np.int32)
        ragged[has] = slots
        counts = (ragged != NO_MORE).sum(axis=1)
        self._take_back(plan, widths - counts)
        for number in range(int(counts.max())):
            chosen = counts > number
            yield plan.sample_rows[chosen], plan.sample_epochs[chosen], slots[starts[chosen] + number]

    def _take_back(self, plan: Plan, num_missing: LongArray) -> None:
        """Promises that the step did not keep."""
        rows = self._rows
        live = rows.epoch[plan.sample_rows] == plan.sample_epochs
        sampled, num_missing = plan.sample_rows[live], num_missing[live]
        rows.pending[sampled] -= num_missing
        rows.cursor[sampled] -= num_missing

    def _settle_one_each(self, sample_rows: IntArray, epochs: LongArray, tokens: IntArray) -> Commit:
        rows, sampled = self._rows, sample_rows.astype(np.int64)  # an index of int32 would be converted at each use
        live = rows.epoch[sampled] == epochs
        if not live.all():
            self._counters.num_overrun += int(len(live) - live.sum())
            sampled, tokens = sampled[live], tokens[live]
        if rows.num_foreseen and (foreseen := rows.foreseen[sampled] > 0).any():
            rows.foreseen[sampled[foreseen]] -= 1
            rows.num_foreseen -= int(foreseen.sum())
            sampled, tokens = sampled[~foreseen], tokens[~foreseen]
        return self._add(sampled, tokens)

    def foresee(self, runs: Mapping[int, Sequence[int]]) -> Commit:
        """The next tokens of rows are known, while a sample of the first of them is in flight."""
        rows, found, left = self._rows, list[Commit](), dict(runs)
        chosen = list(runs)
        rows.foreseen[chosen] += 1
        rows.num_foreseen += len(chosen)
        rows.pending[chosen] += np.array([len(run) - 1 for run in runs.values()])
        for place in range(max(map(len, runs.values()))):  # one token of each row at a time, as samples are settled
            left = {row: run for row, run in left.items() if len(run) > place and rows.request[row] is not None}
            if not left:
                break
            found.append(self._add(np.array([*left]), np.array([run[place] for run in left.values()], np.int32)))
        self._counters.num_forced += sum(commit.num_tokens for commit in found) - len(chosen)
        return joined(found)

    def _add(self, sampled: LongArray, tokens: IntArray) -> Commit:
        """One token to each of the rows."""
        rows, finished = self._rows, list[Finished]()
        if (missing := tokens < 0).any():  # NO_SAMPLE
            finished += [self._finish_without_sample(row) for row in sampled[missing].tolist()]
            sampled, tokens = sampled[~missing], tokens[~missing]
        known = rows.num_tokens[sampled]
        total = known + 1
        rows.tokens[sampled, known] = tokens
        rows.num_tokens[sampled] = total
        rows.pending[sampled] -= 1
        self._counters.num_generated += len(sampled)
        self._sharing.register_full(sampled, total)
        progress = self._progress(sampled, tokens)
        stop_ids = rows.stop_ids[:, : rows.most_stop_ids][sampled]
        stopped = (tokens[:, None] == stop_ids).any(axis=1) & (total >= rows.min_total[sampled])
        over = stopped | (total >= rows.limit[sampled])
        if over.any():
            ends = zip(sampled[over].tolist(), stopped[over].tolist(), strict=True)
            finished += [self._finish(self._owner(row), "stop" if stop else "length", None) for row, stop in ends]
        return Commit(len(sampled), progress, tuple(finished))

    def _progress(self, sampled: LongArray, tokens: IntArray) -> tuple[Progress, ...]:
        streaming = self._rows.streams[sampled]
        if not streaming.any():
            return ()
        pairs = zip(sampled[streaming].tolist(), tokens[streaming].tolist(), strict=True)
        return tuple(progress_of(self._owner(row), token) for row, token in pairs)

    def _finish_without_sample(self, row: int) -> Finished:
        """End a request whose logits had no largest number."""
        request = self._owner(row)
        error = not_finite(int(self._rows.num_tokens[row]), controlled=request.is_controlled)
        return self._finish(request, "error", error)

    def _owner(self, row: int) -> Request:
        request = self._rows.request[row]
        assert request is not None
        return request
