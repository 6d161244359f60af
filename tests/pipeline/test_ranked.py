"""A model on several ranks, which are real processes: the same tokens as on one, at any depth, and what a death does.

The processes start once for each number of ranks. Schedules are those of `gapless check`, and its judge compares.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gapless.config import EngineOptions
from gapless.core.limits import Limits
from gapless.core.plan import Plan
from gapless.device.base import Device
from gapless.errors import ConfigError, RankFailed
from gapless.models.source import resolve
from gapless.pipeline.executor import Executor, LocalExecutor, StepRunner, Ticket
from gapless.pipeline.ranked import OtherRanks, RankedExecutor, ray_camp
from gapless.proof.draw import Menu, draw_asks, draw_schedule
from gapless.proof.judge import Judge
from gapless.proof.play import play
from gapless.proof.schedule import Schedule
from gapless.proof.stage import Cast, ModelStage, Room, fresh_device
from gapless.ranks import ray_seats
from gapless.ranks.ray_seats import SeatWishes
from gapless.ranks.team import Team
from gapless.runner.build import build
from rank_pids import child_pids
from tiny import VOCAB_SIZE, write_tiny

MOST_TOKENS = 6
BLOCK_SIZE = 8
ROOM = Room(num_rows=6, num_places=256, max_batch_tokens=48, max_model_len=48)
DEPTHS = (1, 2, 3)


class Ranks:
    """A stage whose model lies on several ranks; its schedules are played one after the other."""

    tokenizer = None
    room = ROOM

    def __init__(self, model: Path, num_ranks: int) -> None:
        limits = ROOM.limits(BLOCK_SIZE)
        options = EngineOptions(
            model=str(model),
            device="cpu",
            dtype="float32",
            num_threads=1,
            block_size=BLOCK_SIZE,
            num_blocks=limits.num_blocks,
            max_num_rows=limits.num_rows,
            max_batch_tokens=limits.max_batch_tokens,
            max_model_len=limits.max_model_len,
            depth=max(DEPTHS),
            native=False,
        )
        source = resolve(model)
        self.judge = Judge(ModelStage.load(options, source, ROOM, None), MOST_TOKENS)
        self.alarms: queue.SimpleQueue[RankFailed] = queue.SimpleQueue()
        ranked = replace(options, tensor_parallel=num_ranks)
        self._ranks = OtherRanks(ranked, source, max(DEPTHS), self.alarms.put, processed=False)
        built = self._ranks.build(lambda group: build(ranked, source, group=group))
        assert built.resolved.limits.num_blocks == limits.num_blocks
        self._cast = Cast(built.runner, built.kv, built.resolved.limits)
        first = self._ranks.executor(LocalExecutor(built.device, built.runner, limits, 1), limits)
        assert isinstance(first, RankedExecutor)
        self.team: Team = first._team

    def cast(self, block_size: int) -> Cast:
        assert block_size == BLOCK_SIZE
        return self._cast

    def device(self, order: int | None, *, threads: bool, check: bool) -> Device:
        return fresh_device("cpu", order, threads=threads, check=check)

    def executor(self, device: Device, runner: StepRunner, limits: Limits, num_slots: int) -> Executor:
        return Lent(LocalExecutor(device, runner, limits, num_slots), self.team)

    def close(self) -> None:
        self.team.close()


class Lent(RankedExecutor):
    """Leaves the ranks alive for the next schedule."""

    def close(self) -> None:
        self._inner.close()


def schedules(count: int) -> list[Schedule]:
    """Each at every depth; some steps have second halves, for masks."""
    dice = random.Random(7)
    asks = draw_asks(dice, VOCAB_SIZE, 10, MOST_TOKENS)
    menu = Menu(block_sizes=(BLOCK_SIZE,), most_requests=5, most_tokens=MOST_TOKENS, last_arrival=6)
    drawn = [draw_schedule(dice, asks, ROOM, menu) for _ in range(count)]
    return [replace(schedule, depth=depth) for schedule in drawn for depth in DEPTHS]


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(write_tiny(tmp_path_factory.mktemp("model")), request.param)
    yield found
    found.close()


def test_tokens_are_those_of_one_rank_at_every_depth(ranks: Ranks) -> None:
    num_compared, halves = 0, 0
    for schedule in schedules(4 if len(child_pids(ranks.team)) == 1 else 2):
        played = play(ranks, schedule, make_executor=ranks.executor)
        assert played.trouble is None
        verdict = ranks.judge.compare(schedule, played)
        assert verdict.trouble is None
        num_compared += verdict.num_compared
        halves += any(ask.rule is not None for ask in schedule.asks)
    assert num_compared > 20
    assert halves


class Killing(Lent):
    """Kills the last rank behind the launch of a step, which the others are in the middle of then."""

    def launch(self, plan: Plan) -> Ticket:
        ticket = super().launch(plan)
        if plan.step == 3:
            os.kill(child_pids(self._team)[-1], signal.SIGKILL)
        return ticket


def test_a_rank_dies_under_a_schedule(ranks: Ranks) -> None:
    """The last test of these ranks: the loop raises, the alarm names the rank, and nobody is left."""

    def killing(device: Device, runner: StepRunner, limits: Limits, num_slots: int) -> Executor:
        return Killing(LocalExecutor(device, runner, limits, num_slots), ranks.team)

    began = time.monotonic()
    played = play(ranks, replace(schedules(1)[1], threads=True), make_executor=killing)
    assert played.trouble is not None
    assert f"RankFailed: rank {len(child_pids(ranks.team))} was killed by SIGKILL" in played.trouble.message
    assert str(ranks.alarms.get(timeout=5)) in played.trouble.message
    assert time.monotonic() - began < 30
    ranks.close()
    assert all(is_gone(pid) for pid in child_pids(ranks.team))


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_node_whose_address_is_not_its_own_gives_its_seats_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a translation of addresses, where Ray was told the outer one."""
    released: list[bool] = []

    class Seats:
        host, seats, ranks_here, has_gpus = "192.0.2.1", (), (1,), False  # an address of documentation

        def __init__(self, wishes: SeatWishes) -> None:
            self.release = lambda: released.append(True)

    monkeypatch.setattr(ray_seats, "Reservation", Seats)
    options = EngineOptions(model="none", tensor_parallel=2, ranks_on_ray="local")
    with pytest.raises(ConfigError, match=r"no port can be opened at 192\.0\.2\.1.*--node-ip-address"):
        ray_camp(options, "local")
    assert released == [True]
