"""`gapless serve --replicas` on a cluster: streams, a kill under them, a disconnect, a drain."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest

from gapless.cli import main
from tiny import write_tiny

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
from servers import TIMEOUT_S, Server, eventually, running

NUM_STREAMS, NUM_TOKENS = 6, 1500


@pytest.fixture(scope="module")
def long_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("long"), max_position_embeddings=2048)


def served(address: str) -> list[psutil.Process]:
    """Processes of replicas. The cluster stands in the command line of their parent."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "ray::ServeReplica" in " ".join(process.cmdline()):
                parent = process.parent()
                if parent is not None and any(address in word for word in parent.cmdline()):
                    found.append(process)
    return found


def read(server: Server, number: int, begun: threading.Semaphore | None = None) -> str:
    """The text of a stream; told when it has begun."""
    stream = server.client().completions.create(
        model="tiny",
        prompt=f"prompt {number}",
        max_tokens=NUM_TOKENS,
        seed=number,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    first = next(iter(stream)).choices[0].text
    if begun is not None:
        begun.release()
    return first + "".join(chunk.choices[0].text for chunk in stream)


def begin(server: Server) -> openai.Stream[openai.types.Completion]:
    """A stream whose first token has come."""
    stream = server.client().completions.create(
        model="tiny", prompt="b", max_tokens=NUM_TOKENS, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    return stream


def read_all(server: Server, pool: ThreadPoolExecutor) -> list[str]:
    return list(pool.map(lambda number: read(server, number), range(NUM_STREAMS)))


def test_streams_survive_a_replica(tmp_path: Path, long_dir: Path, address: str) -> None:
    flags = ("--served-model-name", "tiny", "--num-blocks", "1024", "--replicas", "2", "--ray", address)
    flags += ("--trace", str(tmp_path / "T.json"))
    with running(tmp_path / "log.jsonl", long_dir, *flags) as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        eventually(lambda: server.metric("gapless_engine_up") == 2, server)
        wanted = read_all(server, pool)
        assert len(set(wanted)) == NUM_STREAMS
        _check_session(server)
        begun = threading.Semaphore(0)
        readers = [pool.submit(read, server, number, begun) for number in range(NUM_STREAMS)]
        for _ in readers:
            assert begun.acquire(timeout=TIMEOUT_S)
        os.kill(served(address)[0].pid, signal.SIGKILL)
        assert [reader.result(TIMEOUT_S) for reader in readers] == wanted
        assert server.metric("gapless_engine_restarts_total") == 1
        _check_disconnect(server)
        stream = begin(server)
        server.process.send_signal(signal.SIGTERM)
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert server.process.wait(TIMEOUT_S) == 0
    assert not served(address)
    runs = json.loads((tmp_path / "T.json").read_text())["otherData"]["runs"]
    assert {run["label"] for run in runs} & {"replica 1", "replica 2"}, "one of them was not killed"
    assert max(run["steps"] for run in runs) > 2 * NUM_TOKENS


def _check_session(server: Server) -> None:
    """Requests of one session go to the same replica."""
    counts = [f'gapless_prompt_tokens_total{{replica="{name}"}}' for name in (1, 2)]
    eventually(lambda: min(map(server.metric, counts)) == sum(map(server.metric, counts)) / 2 > 0, server)
    before = [server.metric(count) for count in counts]
    for number in range(4):
        body = {"prompt": f"{number} of a session", "max_tokens": 1}
        assert server.send("POST", "/v1/completions", body, **{"x-session-id": "mine"})[0] == 200
    num_tokens = 4 * len("0 of a session")
    eventually(lambda: sum(map(server.metric, counts)) == sum(before) + num_tokens, server)
    assert sorted(server.metric(count) - past for count, past in zip(counts, before, strict=True)) == [0, num_tokens]


def _check_disconnect(server: Server) -> None:
    stream = begin(server)
    stream.close()
    eventually(lambda: server.metric('gapless_requests_total{outcome="abort"}') == 1, server)


@pytest.mark.slow
def test_a_signal_to_a_whole_group_ends_a_server_with_a_local_ray(tmp_path: Path, long_dir: Path) -> None:
    """As service managers send it: Ray's processes end first, and nobody waits for them."""
    flags = ("--served-model-name", "tiny", "--num-blocks", "64", "--replicas", "1", "--ray", "local")
    with running(tmp_path / "log.jsonl", long_dir, *flags) as server:
        eventually(lambda: server.metric("gapless_engine_up") == 1, server)
        others = psutil.Process(server.process.pid).children(recursive=True)
        assert any("gcs_server" in process.name() for process in others)
        for process in (*others, psutil.Process(server.process.pid)):
            with contextlib.suppress(psutil.Error):
                process.terminate()
        assert server.process.wait(40) == 0


def test_wrong_wishes_are_one_line(long_dir: Path, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["serve", "--model", str(long_dir), "--device", "cpu", "--port", "0"]
    wrong = {
        ("--replicas", "0"): "--replicas must be at least 1",
        ("--autoscale", "3:2"): "1 <= MIN <= MAX",
        ("--autoscale", "3"): "two whole numbers",
        ("--gpus-per-replica", "1"): "needs --replicas",
        ("--replicas", "1", "--ray", "127.0.0.1:1"): "no Ray cluster answers there",
        ("--replicas", "3", "--ray", address, "--gpus-per-replica", "1"): "too few GPUs: 3 replicas need 1 each",
        ("--replicas", "1", "--trace", "nowhere/T.json"): "no such folder",
        ("--replicas", "9", "--ray", address): "too few CPUs: 9 replicas need 1 each, and the cluster has 8",
    }
    for flags, said in wrong.items():
        assert main([*start, *flags]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert said in line
