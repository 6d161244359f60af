"""The executor of a model that several ranks hold: plans go to all of them, tokens come back from rank 0's own.

Wraps rank 0's executor. Only rank 0 draws tokens, so the second half of a split step is its own affair: the others wait
for the tokens inside the step. A step that fails on any rank leaves the ranks out of step, so it ends all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gapless.config import EngineOptions
from gapless.core.limits import Limits
from gapless.core.plan import Plan
from gapless.core.request import IntArray
from gapless.device import pick_device
from gapless.errors import RankFailed, StepFailed
from gapless.models.rank_group import ONE_RANK, RankGroup
from gapless.models.source import ModelSource
from gapless.pipeline.executor import Executor, FillMasks, Ticket
from gapless.ranks.plan_words import plan_capacity
from gapless.ranks.team import Alarm, Team
from gapless.runner.build import Built
from gapless.runner.calls import Call
from gapless.runner.fill import capacity
from gapless.runner.kits import kit_for
from gapless.runner.resolve import read_config, settle


class RankedExecutor:
    """Runs plans on all ranks."""

    def __init__(self, inner: Executor, team: Team) -> None:
        self._inner, self._team = inner, team

    def launch(self, plan: Plan) -> Ticket:
        self._team.send(plan)
        return self._inner.launch(plan)

    def complete(self, ticket: Ticket, fill_masks: FillMasks, calls: tuple[Call, ...] = ()) -> Ticket:
        return self._inner.complete(ticket, fill_masks, calls)

    def collect(self, ticket: Ticket) -> IntArray:
        try:
            return self._inner.collect(ticket)
        except StepFailed as error:
            raise self._team.blame(error) from error

    def close(self) -> None:
        self._team.close()
        self._inner.close()


class LoneRank:
    """No other ranks: everything stays as it is."""

    def build(self, make: Callable[[RankGroup], Built]) -> Built:
        return make(ONE_RANK)

    def executor(self, inner: Executor, limits: Limits) -> Executor:
        return inner

    def abandon(self) -> None:
        return


class OtherRanks:
    """The other ranks of an engine while it is put together."""

    def __init__(
        self, options: EngineOptions, source: ModelSource, num_slots: int, alarm: Alarm, *, processed: bool
    ) -> None:
        """Their processes start at once, and load while rank 0 does."""
        self._options, self._num_slots = options, num_slots
        self._values = {
            "options": dataclasses.asdict(follower_options(options, source)),
            "num_slots": num_slots,
            "processed": processed,
        }
        self._team = Team(options.tensor_parallel, options.rank_timeout, alarm)

    def build(self, make: Callable[[RankGroup], Built]) -> Built:
        """Have every rank build its part. Raises RankFailed if one of the others cannot."""
        from gapless.ranks.torch_group import CollectiveFailed, TorchGroup, host_store

        options = self._options
        size, timeout_s = options.tensor_parallel, options.rank_timeout
        store = host_store(timeout_s)
        self._team.begin(port=store.port, **self._values)
        try:
            backend = kit_for(pick_device(options.device)).collectives
            return make(TorchGroup(backend, store, 0, size, timeout_s))
        except CollectiveFailed as error:
            raise self._team.blame(error) from error

    def executor(self, inner: Executor, limits: Limits) -> Executor:
        """Once all ranks are ready. Raises RankFailed."""
        self._team.go(self._num_slots, plan_capacity(limits, capacity(limits)))
        return RankedExecutor(inner, self._team)

    def abandon(self) -> None:
        """End the ranks: the engine could not be put together."""
        self._team.close(at_once=True)


def other_ranks(
    options: EngineOptions, source: ModelSource, num_slots: int, alarm: Alarm, *, processed: bool
) -> LoneRank | OtherRanks:
    """Those that the options ask for. Raises ConfigError before any process starts."""
    if options.tensor_parallel == 1:
        return LoneRank()
    settle(options, read_config(source))
    return OtherRanks(options, source, num_slots, alarm, processed=processed)


def follower_options(options: EngineOptions, source: ModelSource) -> EngineOptions:
    """The same model, found; nothing is recorded but by rank 0."""
    return dataclasses.replace(options, model=str(source.path), record=False, trace=None)


__all__ = ["LoneRank", "OtherRanks", "RankFailed", "RankedExecutor", "other_ranks"]
