"""The pool of a server's replicas, with real connections and processes, and stubs for engines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from local_replicas import STUB, VERSIONS, check_all, kill, pool_of, submit, until
from stub_engine import NO_MODEL, POISON

from gapless.config import EngineOptions
from gapless.core.params import SamplingParams
from gapless.distributed.autoscaler import CALM_S, FULL, Autoscaler
from gapless.distributed.cluster import NodeVersions
from gapless.distributed.pool import GONE, EnginePool
from gapless.distributed.serve_replica import EngineRelay
from gapless.server.options import ServerOptions
from gapless.server.supervisor import EngineFailed


def go(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_requests_are_spread_and_stay_with_their_session() -> None:
    async def play() -> None:
        async with pool_of(2) as (pool, _):
            flights = [submit(pool, number, 200) for number in range(10)]
            assert [len(one.roster) for one in pool.members().values()] == [5, 5]
            assert await pool.ping(5)
            flights += [submit(pool, number, 3, "a session") for number in range(10, 16)]
            assert sorted(len(one.roster) for one in pool.members().values()) == [5, 11]
            await check_all(flights)
            assert pool.unfinished() == []
            gone = submit(pool, 1, 4000)
            pool.abort(gone)
            await until(lambda: gone.over is not None)
            assert gone.over.reason == "abort"

    go(play())


def test_requests_of_a_dead_engine_and_of_a_dead_replica_go_on_elsewhere() -> None:
    """The engine of the first replica dies, which calls again; then the whole second replica goes without a word."""

    async def play() -> None:
        async with pool_of(2) as (pool, keeper):
            flights = [submit(pool, number, 300) for number in range(8)]
            await until(lambda: all(len(flight.tokens) > 20 for flight in flights))
            kill(pool, "1")
            await until(lambda: not pool.members()["1"].is_ready)
            assert len(pool.members()["2"].roster) == 8
            await until(lambda: pool.members()["1"].is_ready)
            flights += [submit(pool, number, 300) for number in range(8, 12)]
            assert len(pool.members()["1"].roster) > 0, "it serves again"
            relay = keeper.relays.pop("r1")
            relay._loop.call_soon_threadsafe(relay.vanish)
            await until(lambda: len(pool.members()) == 1)
            await check_all(flights)
            assert pool.num_restarts == 2
            generated = pool.totals()
            assert set(generated) == {GONE, *pool.members()}

    go(play())


def test_requests_wait_while_there_is_no_replica() -> None:
    async def play() -> None:
        async with pool_of(1) as (pool, keeper):
            flights = [submit(pool, number, 100) for number in range(3)]
            relay = keeper.relays.pop("r0")
            relay._loop.call_soon_threadsafe(relay.vanish)
            await until(lambda: not pool.members())
            flights.append(submit(pool, 3, 5))
            ended = submit(pool, 4, 5)
            pool.abort(ended, "timeout")
            assert ended.over.reason == "timeout"
            assert not pool.is_ready
            keeper.add()
            await check_all(flights)

    go(play())


@pytest.mark.parametrize("drain_timeout", [30.0, 0.0])
def test_a_replica_that_leaves_finishes_or_hands_over(drain_timeout: float) -> None:
    async def play() -> None:
        async with pool_of(2, drain_timeout=drain_timeout) as (pool, keeper):
            flights = [submit(pool, number, 250) for number in range(6)]
            await until(lambda: all(flight.tokens for flight in flights))
            leaving = asyncio.to_thread(keeper.scale, 1)
            waiting = asyncio.create_task(leaving)
            await check_all(flights)
            await waiting
            await until(lambda: len(pool.members()) == 1)
            assert pool.num_restarts == 0, "nothing died"
            late = [submit(pool, number, 5) for number in range(4)]
            await check_all(late)

    go(play())


def test_a_request_with_all_its_tokens_is_over_when_its_replica_leaves() -> None:
    """Its last token came, and the word that it was the last did not: no other engine may add to it."""

    async def play() -> None:
        async with pool_of(2) as (pool, _):
            flight = submit(pool, 1, 20)
            member = pool._where[flight.id]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(member.supervisor, "_end", lambda over: None)
                await until(lambda: len(flight.tokens) == 20)
            pool._move(member, everybody=True)
            await check_all([flight])

    go(play())


def test_a_replica_that_calls_before_its_old_connection_is_missed_serves_again() -> None:
    async def play() -> None:
        async with pool_of(1) as (pool, keeper):
            (member,) = pool._members.values()
            again = EngineRelay(keeper.address, "r0", "here", STUB, VERSIONS)
            keeper.relays["again"] = again
            await until(lambda: not member._calls.empty())
            old = keeper.relays.pop("r0")
            old._loop.call_soon_threadsafe(old.vanish)
            await until(again.told.is_set)
            await check_all([submit(pool, number, 10) for number in range(3)])

    go(play())


def test_a_rolling_restart_under_load_fails_nobody() -> None:
    async def play() -> None:
        async with pool_of(2, drain_timeout=0.1) as (pool, keeper):
            before = set(keeper.relays)
            flights = [submit(pool, number, 300) for number in range(6)]
            pool.restart()
            while before & set(keeper.relays) or len(keeper.relays) < 2:
                flights.append(submit(pool, len(flights), 50))
                await asyncio.sleep(0.02)
            await check_all(flights)
            assert pool.num_restarts == 0

    go(play())


def test_a_request_that_takes_engines_down_is_found_and_the_others_go_on() -> None:
    async def play() -> None:
        async with pool_of(2) as (pool, _):
            flights = [submit(pool, number, 400) for number in range(6)]
            poison = pool.submit([POISON], SamplingParams(max_tokens=5), asyncio.Event())
            await until(lambda: poison.over is not None)
            assert poison.over.reason == "refused"
            await check_all(flights)
            assert pool.num_restarts == 2, "only the replica that had it died, twice"

    go(play())


def test_random_kills_lose_and_double_nothing() -> None:
    async def play() -> None:
        dice = random.Random(5)
        async with pool_of(3) as (pool, _):
            flights = []
            for _ in range(8):
                flights += [submit(pool, dice.randrange(90), dice.randrange(1, 200)) for _ in range(4)]
                await asyncio.sleep(dice.random() * 0.2)
                if ready := [name for name, one in pool.members().items() if one.is_ready]:
                    kill(pool, dice.choice(ready))
            await check_all(flights)

    go(play())


def test_replicas_follow_the_load() -> None:
    async def play() -> None:
        scaler = Autoscaler(1, 3, calm_s=0.5)
        async with pool_of(1, scaler) as (pool, keeper):
            flights = [submit(pool, number, 600) for number in range(14)]  # an engine has 8 rows
            await until(lambda: len(pool.members()) == 3)
            await check_all(flights)
            await until(lambda: len(pool.members()) == 1)
            assert len(keeper.relays) == 1

    go(play())


def test_a_server_outlives_a_cluster_that_fails_to_change_its_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with pool_of(1) as (pool, keeper):
            restart, calls = keeper.restart, []

            def fail_once(num_replicas: int) -> None:
                calls.append(num_replicas)
                if len(calls) == 1:
                    raise RuntimeError("the controller is away")
                restart(num_replicas)

            monkeypatch.setattr(keeper, "restart", fail_once)
            pool.restart()
            await until(lambda: "r0" not in keeper.relays and pool.is_ready)
            await check_all([submit(pool, 1, 10)])
            assert calls == [1, 1]

    go(play())


def test_the_rule_of_the_autoscaler() -> None:
    scaler = Autoscaler(2, 6)
    assert scaler.target(0.0, 1000, 0) == 2, "nothing is known of the engines yet"
    assert scaler.target(1.0, 0, 8) == 2
    assert scaler.target(2.0, int(3 * 8 * FULL), 8) == 3
    assert scaler.target(3.0, int(3 * 8 * FULL) + 1, 8) == 4
    assert scaler.target(4.0, 1000, 8) == 6
    assert scaler.target(5.0, 7, 8) == 6, "it may come again"
    assert scaler.target(4.0 + CALM_S, 7, 8) == 6
    assert scaler.target(4.1 + CALM_S, 7, 8) == 2


def test_strangers_and_other_versions_are_refused() -> None:
    async def play() -> None:
        async with pool_of(1) as (pool, keeper):
            address = keeper.address
            stranger = type(address)(address.host, address.port, "wrong")
            for home, versions in ((stranger, VERSIONS), (address, NodeVersions("0", "2", "3"))):
                relay = EngineRelay(home, "x", "there", keeper.relays["r0"]._command, versions)
                await until(relay.is_over.is_set)
                assert relay.failure
            assert len(pool.members()) == 1
            assert pool.is_ready

    go(play())


@pytest.mark.parametrize(
    ("model", "versions", "said"),
    [(NO_MODEL, VERSIONS, "no such model"), ("m", NodeVersions("0", "2", "3"), "node here has Gapless 1 instead of 0")],
)
def test_if_the_first_replica_cannot_serve_the_reason_is_told(model: str, versions: NodeVersions, said: str) -> None:
    from local_replicas import LocalReplicas

    async def play() -> None:
        keeper = LocalReplicas()
        options = EngineOptions(model=model)
        pool = EnginePool(options, ServerOptions(), keeper, Autoscaler(1, 1), "127.0.0.1", versions)
        with pytest.raises(EngineFailed, match=said):
            await pool.run()
        await pool.close()

    go(play())
