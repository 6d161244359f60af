"""The router sends requests where their prefix is, unless somebody else is faster."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from gapless.distributed.prefix_map import PrefixMap
from gapless.distributed.router import MOST_SESSIONS, POLICIES, REQUEST_TOKENS, Router
from gapless.errors import ConfigError, NoReplica

BLOCK = 4
LONG = list(range(1000))  # a prompt that is dearer to compute than several requests are to wait for


def router(policy: str = "prefix", replicas: int = 3, cache_tokens: int = 4000) -> Router:
    made = Router(policy, block_tokens=BLOCK)
    for number in range(replicas):
        made.join(f"r{number}", cache_tokens)
    return made


def send(made: Router, name: str, tokens: list[int], session: str | None = None) -> str:
    """Route, and finish at once."""
    replica = made.route(name, tokens, session).replica
    made.finished(name)
    return replica


# -- no replica, one replica, many ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_without_replicas_a_request_is_refused(policy: str) -> None:
    with pytest.raises(NoReplica, match="no replica is running"):
        Router(policy).route("a", [1, 2, 3])


@pytest.mark.parametrize("policy", POLICIES)
def test_all_draining_refuse_and_one_more_accepts(policy: str) -> None:
    made = router(policy, replicas=2)
    made.drain("r0")
    made.drain("r1")
    with pytest.raises(NoReplica, match="none of 2 replicas accepts requests: all are draining"):
        made.route("a", LONG)
    assert made.counters.num_routed == 0
    made.join("r2", 100)
    assert made.route("a", LONG).replica == "r2"


@pytest.mark.parametrize("policy", POLICIES)
def test_one_replica_gets_everything(policy: str) -> None:
    made = router(policy, replicas=1)
    assert {made.route(str(n), LONG[:n]).replica for n in range(50)} == {"r0"}


@pytest.mark.parametrize("policy", ["prefix", "load"])
def test_equal_scores_take_turns(policy: str) -> None:
    made = router(policy)
    chosen = [made.route(str(n), [n] * 10).replica for n in range(9)]
    assert chosen == ["r0", "r1", "r2"] * 3
    idle = router(policy)
    assert [send(idle, str(n), [n] * 10) for n in range(6)] == ["r0", "r1", "r2"] * 2


def test_random_is_spread_and_follows_its_seed() -> None:
    runs = [[made.route(str(n), LONG).replica for n in range(300)] for made in (router("random"), router("random"))]
    assert runs[0] == runs[1]
    assert all(runs[0].count(f"r{n}") > 60 for n in range(3))


def test_bad_options() -> None:
    with pytest.raises(ConfigError, match="routing must be one of prefix, load, random, not 'fast'"):
        Router("fast")
    with pytest.raises(ConfigError, match="block_tokens must be at least 1"):
        Router(block_tokens=0)
    with pytest.raises(ConfigError, match="'r0' has joined already"):
        router().join("r0", 1)


# -- prefixes and loads --------------------------------------------------------------------------------------------


def test_a_prefix_goes_where_it_is_cached() -> None:
    made = router()
    home = send(made, "first", LONG)
    for number in range(10):
        route = made.route(str(number), LONG + [number] * 20)
        made.finished(str(number))
        assert route.replica == home
        assert route.num_cached == len(LONG)
    assert send(made, "other", list(range(5000, 6000))) != home


def test_load_routing_ignores_prefixes() -> None:
    made = router("load")
    assert [send(made, str(n), LONG) for n in range(3)] == ["r0", "r1", "r2"]


def test_a_prefix_is_given_up_where_waiting_is_longer() -> None:
    made = router()
    home = made.route("a", LONG).replica  # 1000 tokens to compute, and nobody says that they are computed
    away = made.route("b", LONG).replica
    assert away != home
    made = router()
    home = made.route("a", LONG).replica
    made.started("a")
    made.started("a")
    assert made.load_of(home) == REQUEST_TOKENS
    assert made.route("b", LONG).replica == home


def test_the_longest_prefix_wins_among_equal_loads() -> None:
    made = router()
    short, long = made.route("a", LONG[:200]).replica, made.route("b", [9, *LONG]).replica
    made.finished("a")
    made.finished("b", LONG)  # what the replica has at the end is what counts
    assert short != long
    assert made.route("c", LONG).replica == long


def test_answers_count_as_prefixes_of_the_next_question() -> None:
    made = router()
    home = made.route("a", LONG[:100]).replica
    made.finished("a", LONG[:500])
    route = made.route("b", LONG[:600])
    assert (route.replica, route.num_cached) == (home, 500)


def test_what_a_full_cache_dropped_is_no_prefix() -> None:
    made = router(replicas=1, cache_tokens=1200)
    send(made, "a", LONG)
    send(made, "b", list(range(5000, 5400)))  # 400 tokens: the end of LONG has to go, its start stays
    assert made.route("c", LONG).num_cached == 800


def test_evictions_that_are_told() -> None:
    made = router(replicas=1)
    send(made, "a", LONG)
    made.evicted("r0", LONG, num_kept=400)
    made.evicted("unknown", LONG)
    assert made.route("b", LONG).num_cached == 400


def test_a_replica_without_a_cache() -> None:
    made = router(replicas=1, cache_tokens=0)
    send(made, "a", LONG)
    assert made.route("b", LONG).num_cached == 0


def test_short_prompts_have_no_blocks() -> None:
    made = router()
    for tokens in ([], [1], [1, 2, 3, 4]):
        assert made.route("a", tokens).num_cached == 0


# -- sessions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_session_stays(policy: str) -> None:
    made = router(policy)
    home = made.route("a", LONG, "s").replica
    assert {made.route(str(n), [n] * 50, "s").replica for n in range(20)} == {home}
    assert made.counters.num_kept == 20


@pytest.mark.parametrize("end", ["drain", "leave"])
def test_a_session_moves_when_its_replica_ends(end: str) -> None:
    made = router()
    home = send(made, "a", LONG, "s")
    getattr(made, end)(home)
    away = send(made, "b", LONG, "s")
    assert away != home
    assert send(made, "c", [1], "s") == away


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_SESSIONS >= 1000
    monkeypatch.setattr("gapless.distributed.router.MOST_SESSIONS", 10)
    made = router()
    for number in range(30):
        send(made, "a", [number], f"s{number}")
    assert len(made._sessions) == 10


# -- replicas that end ---------------------------------------------------------------------------------------------


def test_requests_of_a_lost_replica_are_named_and_routed_again() -> None:
    made = router(replicas=2)
    where = {name: made.route(name, [n] * 8).replica for n, name in enumerate("abcd")}
    lost = made.leave("r0")
    assert lost == [name for name in "abcd" if where[name] == "r0"]
    assert made.leave("r0") == []
    assert {made.route(name, [1] * 8).replica for name in lost} == {"r1"}
    made.join("r0", 4000)
    assert made.load_of("r0") == 0
    assert made.route("e", [5] * 8).num_cached == 0


def test_a_request_that_is_routed_again_moves() -> None:
    made = router(replicas=2)
    first = made.route("a", LONG).replica
    made.drain(first)
    second = made.route("a", LONG).replica
    assert second != first
    assert made.load_of(first) == 0
    assert [place.state for place in made.places] == ["draining", "accepting"]


def test_loads_add_up_whatever_happens() -> None:
    draw, made = random.Random(5), router("prefix", 0)
    for number in range(2000):
        names, running = [place.name for place in made.places], list(made._where)
        event = draw.random()
        if event < 0.05 and len(names) < 9:
            made.join(f"r{number}", draw.choice([0, 40, 400]))
        elif event < 0.08 and names:
            draw.choice([made.leave, made.drain])(draw.choice(names))
        elif event < 0.4 and running:
            draw.choice([made.started, made.finished])(draw.choice(running))
        elif any(place.accepts for place in made.places):
            start = draw.choice([0, 100])
            tokens = list(range(start, start + draw.randrange(60)))
            assert made.route(str(draw.randrange(100)), tokens, draw.choice([None, "s", "t"])).replica in names
        for place in made.places:
            want = sum(sent.num_left + REQUEST_TOKENS for sent in place.requests.values())
            assert made.load_of(place.name) == want
    for name in [place.name for place in made.places]:
        made.leave(name)
    assert not made._where
    assert len(made._prefixes) == 0


# -- the map -------------------------------------------------------------------------------------------------------


def test_the_map_equals_a_plain_one() -> None:
    """Against token lists of each replica, with room for everything."""
    draw, found = random.Random(1), PrefixMap(BLOCK)
    sent: dict[int, list[list[int]]] = {slot: [] for slot in range(11)}
    for slot in sent:
        found.join(slot, 10**6)
    for _ in range(200):
        prompt = [draw.randrange(2) for _ in range(draw.randrange(1, 30))]
        usable = len(prompt) // BLOCK * BLOCK
        want = [
            max((_common(prompt[:usable], other) // BLOCK * BLOCK for other in known), default=0)
            for known in sent.values()
        ]
        hashes = found.hashes(np.array(prompt, np.int32))
        assert found.num_cached(hashes, len(sent)).tolist() == want
        slot = draw.randrange(len(sent))
        found.touch(slot, hashes)
        sent[slot].append(prompt[:usable])


def _common(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_thousand_replicas_are_no_slower_than_their_requests() -> None:
    made = Router()
    for number in range(1000):
        made.join(str(number), 400_000)
    system = np.arange(2048)
    prompts = [np.concatenate((system, np.full(2048, n))) for n in range(50)]
    for n in range(1000):
        made.route(f"warm{n}", system)
    began = time.perf_counter()
    for n, prompt in enumerate(prompts):
        made.route(str(n), prompt)
    assert time.perf_counter() - began < 0.5, "10 ms each would be far too slow"
