"""The engine dies, hangs or raises; its clients see a pause, and then exactly what they would have seen."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from servers import Server, eventually, running

KILLS, HANGS, RAISES, DIES, SEAT = "~~~~", "^^^^", "````", "{{{{", "}}}}"  # what faulty_engine.py listens for
PROMPTS = [f"{i} times {i} is" for i in range(24)]
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 400, "temperature": 1.0, "stream": True}


@dataclass(frozen=True)
class Answer:
    text: str
    logprobs: list[float]  # of the prompt's tokens but the first, and of the generated ones

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Answer)
        return self.text == other.text and self.logprobs == pytest.approx(other.logprobs, abs=1e-3)


async def stream(client: openai.AsyncOpenAI, prompt: str, seed: int, seen: list[int]) -> Answer:
    text, logprobs = "", []
    extra = {"ignore_eos": True, "timeout": 500}
    question = ASKED | {"prompt": prompt, "seed": seed, "echo": True, "logprobs": 1, "extra_body": extra}
    async for chunk in await client.completions.create(**question):
        text += chunk.choices[0].text
        logprobs += chunk.choices[0].logprobs.token_logprobs
        seen[0] += 1
    assert len(logprobs) == len(prompt) + ASKED["max_tokens"]
    return Answer(text, logprobs[1:])


async def stream_all(server: Server, prompts: list[str], disturb: Any = None) -> list[Answer]:
    """What is said to all prompts, streamed at the same time, while `disturb` does its worst."""
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=500)
    seen = [0]
    work = asyncio.gather(*(stream(client, prompt, seed, seen) for seed, prompt in enumerate(prompts)))
    if disturb is not None:
        await disturb(seen, work)
    return list(await work)


def killer(server: Server, num_kills: int, seed: int, number: signal.Signals = signal.SIGKILL) -> Any:
    """Kills the engine at random moments while streams are under way."""
    random_s = random.Random(seed)

    async def disturb(seen: list[int], work: asyncio.Future[Any]) -> None:
        killed = 0
        while killed < num_kills and not work.done():
            engines = server.num_engines
            before = seen[0]
            if random_s.random() < 0.8:  # usually let some tokens come first
                while seen[0] == before and not work.done():
                    await asyncio.sleep(0.005)
            await asyncio.sleep(random_s.random())
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.engine_pid, number)
                killed += 1
            while server.num_engines == engines:
                await asyncio.sleep(0.01)

    return disturb


def poison(server: Server, fault: str) -> Any:
    """Asks for a fault while streams are under way, and is refused.

    It asks twice over: the engine may cut the prompt into two chunks, and then one of them still has the fault whole.
    """

    async def disturb(seen: list[int], work: asyncio.Future[Any]) -> None:
        while not seen[0]:
            await asyncio.sleep(0.005)
        with pytest.raises(openai.InternalServerError, match="running each time the engine died") as caught:
            await asyncio.to_thread(server.client().completions.create, model="tiny", prompt=2 * fault, max_tokens=5)
        assert caught.value.code == "engine_crash"
        assert not work.done()

    return disturb


def test_dead_engines_are_not_noticed_but_by_who_killed_them(faulty: Server) -> None:
    """Nothing lost, nothing doubled, four engines later: one is killed, one crashes by itself, so that everybody is
    tried and nobody is to blame, and two are taken down by a request."""
    prompts = PROMPTS[:8]
    undisturbed = asyncio.run(stream_all(faulty, prompts))
    refused = faulty.metric('gapless_requests_total{outcome="refused"}')
    restarts = faulty.metric("gapless_engine_restarts_total")

    async def disturb(seen: list[int], work: asyncio.Future[Any]) -> None:
        await killer(faulty, 1, seed=1)(seen, work)
        await killer(faulty, 1, seed=2, number=signal.SIGABRT)(seen, work)
        await poison(faulty, RAISES)(seen, work)

    assert asyncio.run(stream_all(faulty, prompts, disturb)) == undisturbed
    assert all(len(answer.text) > 300 for answer in undisturbed)
    assert faulty.metric("gapless_engine_restarts_total") == restarts + 4
    assert faulty.metric('gapless_requests_total{outcome="refused"}') == refused + 1


@pytest.mark.slow
def test_fifty_kills_under_load(faulty: Server) -> None:
    undisturbed = asyncio.run(stream_all(faulty, PROMPTS))
    restarts = faulty.metric("gapless_engine_restarts_total")
    refused = faulty.metric('gapless_requests_total{outcome="refused"}')
    rounds = 0
    while (killed := faulty.metric("gapless_engine_restarts_total") - restarts) < 50:
        disturbed = asyncio.run(stream_all(faulty, PROMPTS, killer(faulty, int(50 - killed), seed=rounds)))
        assert disturbed == undisturbed, f"round {rounds}"
        rounds += 1
    assert faulty.metric('gapless_requests_total{outcome="refused"}') == refused
    print(f"{killed:.0f} kills in {rounds} rounds of {len(PROMPTS)} streams")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "most"),
    [(KILLS, 4), (HANGS, 2), (RAISES, 2), (DIES, 2), (SEAT, 2)],
    ids=["kills", "hangs", "raises", "dies", "seat"],
)
def test_who_takes_the_engine_down_is_refused_alone(faulty: Server, fault: str, most: int) -> None:
    undisturbed = asyncio.run(stream_all(faulty, PROMPTS))
    restarts = faulty.metric("gapless_engine_restarts_total")
    assert asyncio.run(stream_all(faulty, PROMPTS, poison(faulty, fault))) == undisturbed
    assert faulty.metric("gapless_engine_restarts_total") == restarts + most


def test_a_stuck_engine_is_found_and_replaced(faulty: Server) -> None:
    """Its process is there and the port is open, and yet /health says 503; the watchdog then replaces it."""
    faulty.wait_ready()
    engines = faulty.num_engines
    assert faulty.get("/health")[0] == 200
    os.kill(faulty.engine_pid, signal.SIGSTOP)
    assert faulty.error("GET", "/health")[0] == 503
    eventually(lambda: faulty.get("/ready")[0] == 503, faulty)
    assert json.loads(faulty.get("/ready")[1])["error"]["code"] == "restarting"
    assert faulty.client().completions.create(model="tiny", prompt="late", max_tokens=2).usage  # served all the same
    assert faulty.num_engines == engines + 1
    assert faulty.get("/health")[0] == 200
    assert faulty.get("/ready")[0] == 200
    assert any("no step ended within 2 s" in line["message"] for line in faulty.lines())


def test_a_death_before_the_first_step_is_blamed_on_its_request(faulty: Server) -> None:
    """The engine dies while it gives the request a row: twice, and then the request is refused."""
    restarts = faulty.metric("gapless_engine_restarts_total")
    with pytest.raises(openai.InternalServerError, match="running each time the engine died") as caught:
        faulty.client().completions.create(model="tiny", prompt=SEAT, max_tokens=5)
    assert caught.value.code == "engine_crash"
    assert faulty.metric("gapless_engine_restarts_total") == restarts + 2
    assert faulty.client().completions.create(model="tiny", prompt="late", max_tokens=2).usage


@pytest.mark.slow
def test_an_engine_that_is_stopped_while_it_reloads_is_replaced(tmp_path: Path, long_dir: Path) -> None:
    flags = ("--num-blocks", "64", "--load-timeout", "12", "--served-model-name", "tiny")
    with running(tmp_path / "log.jsonl", long_dir, *flags) as server:
        first = server.engine_pid
        os.kill(first, signal.SIGKILL)
        loading = eventually(lambda: [pid for pid in _engines(server.process.pid) if pid != first], server)[0]
        os.kill(loading, signal.SIGSTOP)
        assert server.client().completions.create(model="tiny", prompt="late", max_tokens=2).usage
        assert server.engine_pid not in (first, loading)
        assert any("loading made no progress within 12 s" in line["message"] for line in server.lines())


def _engines(parent: int) -> list[int]:
    """Engine processes of a server, those that load too."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in children if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_cancelled_prefills_change_no_other_answer(faulty: Server) -> None:
    """A quarter of the requests leave in mid-prefill; prompts share prefixes, so that blocks do too."""
    shared = "The quick brown fox jumps over the lazy dog. " * 12
    prompts = [shared + str(i) for i in range(16)]

    async def gather(cancel: bool) -> list[str | None]:
        client = openai.AsyncOpenAI(base_url=f"{faulty.url}/v1", api_key="none", max_retries=0)
        tasks = [asyncio.create_task(_text(client, prompt, i)) for i, prompt in enumerate(prompts)]
        if cancel:
            for index, task in enumerate(tasks[::4]):
                await asyncio.sleep(0.01 * (index + 1))
                task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        return [text if isinstance(text, str) else None for text in found]

    async def _text(client: openai.AsyncOpenAI, prompt: str, seed: int) -> str:
        answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=40, seed=seed)
        return answer.choices[0].text

    whole, cut = asyncio.run(gather(cancel=False)), asyncio.run(gather(cancel=True))
    assert [text for i, text in enumerate(cut) if i % 4] == [text for i, text in enumerate(whole) if i % 4]
    assert None in cut
    eventually(lambda: faulty.metric("gapless_running_requests") == 0, faulty)
    eventually(lambda: faulty.metric("gapless_kv_use_ratio") == 0, faulty)


def test_an_engine_ends_with_its_server(tmp_path: Path, long_dir: Path) -> None:
    """However the server ends: this one is killed."""
    with running(tmp_path / "log.jsonl", long_dir, "--num-blocks", "64") as server:
        pid = server.engine_pid
        server.process.kill()
        server.process.wait()
        eventually(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])
