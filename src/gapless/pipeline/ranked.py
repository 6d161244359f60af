"""The executor of a model that several ranks hold: plans go to all of them, tokens come back from rank 0's own.

Wraps rank 0's executor. Only rank 0 draws tokens, so the second half of a split step is its own affair: the others wait
for the tokens inside the step. A step that fails on any rank leaves the ranks out of step, so it ends all of them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass

from gapless.config import GPU, EngineOptions, see_gpus
from gapless.core.limits import Limits
from gapless.core.plan import Plan
from gapless.core.request import IntArray
from gapless.device import pick_device
from gapless.errors import ConfigError, RankFailed, StepFailed
from gapless.models.rank_group import ONE_RANK, RankGroup
from gapless.models.source import ModelSource
from gapless.pipeline.executor import Executor, FillMasks, Ticket
from gapless.ranks.local import LocalSquad
from gapless.ranks.mate import Squad
from gapless.ranks.plan_words import plan_capacity
from gapless.ranks.remote import RemoteSquad
from gapless.ranks.team import Alarm, Team
from gapless.runner.build import Built
from gapless.runner.calls import Call
from gapless.runner.fill import capacity
from gapless.runner.kits import kit_for
from gapless.runner.kits.base import Settings
from gapless.runner.resolve import cut, read_config, settle

LOCAL = "127.0.0.1"


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


@dataclass(frozen=True, slots=True)
class Camp:
    """Where the ranks of a group are."""

    host: str  # rank 0's own address, by which the others reach it
    squads: tuple[Squad, ...]

    def close(self) -> None:
        """Before any rank has started; later the team does it."""
        for squad in self.squads:
            squad.close()


def local_camp(options: EngineOptions) -> Camp:
    """Everybody on this machine."""
    return Camp(LOCAL, (LocalSquad(range(1, options.tensor_parallel), LOCAL, options.rank_timeout),))


def ray_camp(options: EngineOptions, address: str) -> Camp:
    """Where Ray has room. Raises ConfigError."""
    from gapless.ranks.ray_seats import Reservation, SeatWishes

    wants_gpus = {"auto": None, GPU: True}.get(options.device, False)
    timeout_s = options.rank_timeout
    wishes = SeatWishes(address, options.tensor_parallel, options.rank_placement, wants_gpus, timeout_s)
    found = Reservation(wishes)
    if found.has_gpus:
        see_gpus(found.gpus_here)
    try:
        elsewhere = RemoteSquad(found.seats, found.host, timeout_s, found.release)
    except OSError as error:
        found.release()
        raise ConfigError(
            f"ranks_on_ray: no port can be opened at {found.host}, this node's address in the cluster ({error}); "
            "start Ray here with the --node-ip-address of a network interface"
        ) from error
    if not found.ranks_here:
        return Camp(found.host, (elsewhere,))
    return Camp(found.host, (LocalSquad(found.ranks_here, found.host, timeout_s), elsewhere))


class OtherRanks:
    """The other ranks of an engine while it is put together."""

    def __init__(
        self, options: EngineOptions, source: ModelSource, num_slots: int, alarm: Alarm, *, processed: bool
    ) -> None:
        """Their processes start at once, and load while rank 0 does. Raises ConfigError before any does."""
        self._options, self._num_slots = options, num_slots
        camp = local_camp(options) if options.ranks_on_ray is None else ray_camp(options, options.ranks_on_ray)
        try:
            followed = follower_options(options, settle(options, read_config(source)))
        except BaseException:
            camp.close()
            raise
        self._values = {
            "options": dataclasses.asdict(followed),
            "path": os.path.abspath(source.path),
            "num_slots": num_slots,
            "processed": processed,
        }
        self._host = camp.host
        self._team = Team(camp.squads, options.rank_timeout, alarm)

    def build(self, make: Callable[[RankGroup], Built]) -> Built:
        """Have every rank build its part. Raises RankFailed if one of the others cannot."""
        from gapless.ranks.torch_group import CollectiveFailed, TorchGroup, host_store

        options = self._options
        size, timeout_s = options.tensor_parallel, options.rank_timeout
        store = host_store(timeout_s, self._host)
        self._team.begin(host=self._host, port=store.port, **self._values)
        try:
            backend = kit_for(pick_device(options.device)).collectives
            return make(TorchGroup(backend, store, 0, size, timeout_s, self._host))
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
    cut(options, read_config(source))
    return OtherRanks(options, source, num_slots, alarm, processed=processed)


def follower_options(options: EngineOptions, settings: Settings) -> EngineOptions:
    """The same device and type on every machine; nothing is recorded but by rank 0."""
    dtype = str(settings.dtype).removeprefix("torch.")
    return dataclasses.replace(options, device=settings.device_name, dtype=dtype, record=False, trace=None)


__all__ = ["LoneRank", "OtherRanks", "RankFailed", "RankedExecutor", "other_ranks"]
