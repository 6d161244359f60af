"""Ranks that Ray places, on a cluster of two nodes: the same tokens, and what becomes of a group that loses one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from gapless import LLM, SamplingParams
from gapless.cli import main
from gapless.distributed.cluster import NodeVersions, here
from gapless.errors import ConfigError, EngineClosed
from gapless.pipeline.ranked import RankedExecutor
from gapless.ranks.ray_seats import SeatWishes, _check_room
from rank_pids import child_pids
from tiny import CPU, write_tiny

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
from servers import TIMEOUT_S, eventually, running

NODE = {"num_cpus": 2, "object_store_memory": 80_000_000}
OPTIONS: dict[str, Any] = CPU | {"num_threads": 1, "native": False, "num_blocks": 256, "rank_timeout": 20.0}
SPREAD: dict[str, Any] = {"tensor_parallel": 2, "rank_placement": "spread"}
PROMPTS = ["hello", "how are you today, my friend? And how are your friends?", "xyz"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=800, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Two, with room for two ranks each."""
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    cluster.add_node(**NODE)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


def followers(cluster: Cluster) -> list[int]:
    """Ranks that actors have started. The cluster stands in the command line of an actor's parent."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "gapless.pipeline.follower" in process.cmdline():
                actor = process.parent()
                raylet = actor.parent() if actor is not None else None
                if raylet is not None and any(cluster.address in word for word in raylet.cmdline()):
                    found.append(process.pid)
    return found


def soon(is_so: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_so()


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_are_those_of_one_process(depth: int, model: Path, nodes: Cluster) -> None:
    params = [GREEDY] * 3 + [DRAWN] * 3
    with LLM(model, **OPTIONS, depth=depth) as one:
        wanted = [done.token_ids for done in one.generate(PROMPTS * 2, params)]
    before = signal.getsignal(signal.SIGTERM)
    with LLM(model, **OPTIONS, depth=depth, ranks_on_ray=nodes.address, **SPREAD) as two:
        assert len(followers(nodes)) == 1
        assert [done.token_ids for done in two.generate(PROMPTS * 2, params)] == wanted
    assert signal.getsignal(signal.SIGTERM) is before
    assert not ray.is_initialized()
    assert soon(lambda: not followers(nodes))


def check_loss(llm: LLM, lose: Callable[[], object], told: str) -> None:
    """A rank is lost under requests: each gets the error that names it, within the time limit."""
    with ThreadPoolExecutor(1) as pool:
        stream = llm.stream("hello", LONG)
        running = pool.submit(llm.generate, PROMPTS, LONG)
        next(iter(stream))
        lose()
        began = time.monotonic()
        errors = [done.error or "" for done in running.result(60)]
    assert all(re.search(told, error) for error in errors), errors
    assert time.monotonic() - began < OPTIONS["rank_timeout"]
    with pytest.raises(EngineClosed):
        llm.generate(PROMPTS, GREEDY)


def test_a_remote_rank_is_killed_under_requests(model: Path, nodes: Cluster) -> None:
    told = r"rank 1 on node [0-9.]+ was killed by SIGKILL; the group of 2 ranks has ended"
    with LLM(model, **OPTIONS, depth=2, ranks_on_ray=nodes.address, **SPREAD) as llm:
        check_loss(llm, lambda: os.kill(followers(nodes)[0], signal.SIGKILL), told)
    assert soon(lambda: not followers(nodes))


@pytest.mark.slow
def test_a_node_is_killed_under_requests(model: Path, nodes: Cluster) -> None:
    """And the next group is on the node that takes its place."""
    (lost,) = nodes.worker_nodes
    with LLM(model, **OPTIONS, depth=2, ranks_on_ray=nodes.address, **SPREAD) as llm:
        wanted = llm.generate(PROMPTS, GREEDY)
        told = r"rank 1 on node [0-9.]+ (is gone with its actor or its node|closed its connection)"
        check_loss(llm, lambda: nodes.remove_node(lost, allow_graceful=False), told)
    assert soon(lambda: not followers(nodes))
    nodes.add_node(**NODE)
    with LLM(model, **OPTIONS, depth=2, ranks_on_ray=nodes.address, **SPREAD) as llm:
        assert [done.token_ids for done in llm.generate(PROMPTS, GREEDY)] == [done.token_ids for done in wanted]


@pytest.mark.slow
def test_a_remote_rank_stands_still(model: Path, nodes: Cluster) -> None:
    """It is alive and says nothing, so the time limit of the others ends the group, and it with them."""
    options = OPTIONS | {"tensor_parallel": 4, "rank_placement": "pack", "rank_timeout": 6.0}
    with LLM(model, **options, depth=2, ranks_on_ray=nodes.address) as llm:
        llm.generate(PROMPTS, GREEDY)
        os.kill(followers(nodes)[0], signal.SIGSTOP)
        began = time.monotonic()
        errors = [done.error or "" for done in llm.generate(PROMPTS, GREEDY)]
        assert all("did not come within 6 s" in error for error in errors), errors
        assert time.monotonic() - began < 20
        assert soon(lambda: not followers(nodes))


ORPHANS = """
import sys, time
from gapless import LLM
from test_ranks_on_ray import OPTIONS
llm = LLM(sys.argv[1], **OPTIONS, tensor_parallel=4, rank_placement="pack", ranks_on_ray=sys.argv[2])
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_no_rank_outlives_the_first(model: Path, nodes: Cluster) -> None:
    """And what was reserved for them is free again."""
    command = [sys.executable, "-c", ORPHANS, str(model), nodes.address]
    path = os.pathsep.join([*map(str, (Path(__file__).parent, Path(__file__).parents[1])), os.environ["PYTHONPATH"]])
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert len(followers(nodes)) == 2
        process.kill()
    assert soon(lambda: not followers(nodes))
    with LLM(model, **OPTIONS, tensor_parallel=4, rank_placement="pack", ranks_on_ray=nodes.address) as llm:
        assert llm.generate(PROMPTS, GREEDY)


def test_a_server_starts_a_new_group_and_requests_go_on(tmp_path: Path, model: Path, nodes: Cluster) -> None:
    flags = ("--served-model-name", "tiny", "--num-blocks", "256", "--tensor-parallel", "2", "--no-native")
    flags += ("--ranks-on-ray", nodes.address, "--rank-placement", "spread")
    ask: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 300, "seed": 1}
    with running(tmp_path / "log.jsonl", model, *flags) as server:
        eventually(lambda: server.num_engines == 1, server)
        client = server.client().completions
        wanted = client.create(**ask, extra_body={"ignore_eos": True}).choices[0].text
        stream = client.create(**ask, extra_body={"ignore_eos": True}, stream=True)
        text = next(iter(stream)).choices[0].text
        (pid,) = followers(nodes)
        os.kill(pid, signal.SIGKILL)
        assert text + "".join(chunk.choices[0].text for chunk in stream) == wanted
        assert server.num_engines == 2
        assert followers(nodes) != [pid]
        died = [line["message"] for line in server.lines() if "engine process died" in line["message"]]
        assert re.search(r"rank 1 on node [0-9.]+ was killed by SIGKILL", died[0])
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT_S) == 0
    assert soon(lambda: not followers(nodes))


def refusal(model: Path, nodes: Cluster, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        LLM(model, **OPTIONS, ranks_on_ray=nodes.address, **options)
    return str(refused.value)


def test_too_few_for_the_placement(model: Path, nodes: Cluster) -> None:
    told = "too few CPUs: 4 ranks need 1 each on the node of rank 0, which has 2; or use rank_placement pack or spread"
    assert refusal(model, nodes, tensor_parallel=4) == told
    assert not ray.is_initialized()


ROOM = {
    ("strict_pack", 3, (2, 8)): "3 ranks need 1 each on the node of rank 0, which has 2; or use rank_placement pack",
    ("pack", 5, (2, 2)): "5 ranks need 1 each, and the cluster has 4 on 2 nodes; use a smaller tensor_parallel",
    ("spread", 2, (0, 4)): "2 ranks need 1 each, and this node, where rank 0 runs, has none",
    ("spread", 4, (1, 3)): None,
    ("strict_pack", 2, (2, 0)): None,
}


@pytest.mark.parametrize("case", ROOM, ids=str)
def test_room(case: tuple[str, int, tuple[int, int]]) -> None:
    placement, num_ranks, gpus = case
    wishes = SeatWishes("auto", num_ranks, placement, None, 1.0)
    told = ROOM[case]
    with pytest.raises(ConfigError, match="^too few GPUs: " + told) if told else contextlib.nullcontext():
        _check_room(wishes, "GPU", gpus[0], list(gpus))


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "num_ranks", "num_elsewhere"), [("strict_pack", 2, 0), ("pack", 4, 2)])
def test_ranks_on_the_node_of_rank_0(
    placement: str, num_ranks: int, num_elsewhere: int, model: Path, nodes: Cluster
) -> None:
    """They are its children and read the ring, beside those that get plans over TCP."""
    with LLM(model, **OPTIONS, depth=2) as one:
        wanted = [done.token_ids for done in one.generate(PROMPTS, GREEDY)]
    options = {"tensor_parallel": num_ranks, "rank_placement": placement, "ranks_on_ray": nodes.address}
    with LLM(model, **OPTIONS, depth=2, **options) as ranked:
        assert len(followers(nodes)) == num_elsewhere
        executor = ranked.engine._parts.executor
        assert isinstance(executor, RankedExecutor)
        assert len(child_pids(executor._team)) == num_ranks - 1 - num_elsewhere
        assert [done.token_ids for done in ranked.generate(PROMPTS, GREEDY)] == wanted


def gapless(model: Path, *flags: str) -> list[str]:
    return ["generate", "hello", "--model", str(model), "--device", "cpu", "--tensor-parallel", "2", *flags]


WRONG = {
    ("--ranks-on-ray", "127.0.0.1:1"): "ranks_on_ray 127.0.0.1:1: no Ray cluster answers there",
    ("--ranks-on-ray", "here"): "ranks_on_ray here: an address is HOST:PORT, auto or local",
    ("--rank-placement", "spread"): "rank_placement spread: Ray places ranks with ranks_on_ray alone",
    ("--ranks-on-ray", "auto", "--tensor-parallel", "1"): "ranks_on_ray: there is one rank",
    ("--ranks-on-ray", "auto", "--tensor-parallel", "3"): "tensor_parallel 3: LlamaForCausalLM: 4 attention heads",
}


@pytest.mark.parametrize("flags", WRONG, ids=" ".join)
def test_wrong_wishes_are_one_line(flags: tuple[str, ...], model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(gapless(model, *flags)) == 2
    said = capsys.readouterr().err.strip()
    assert WRONG[flags] in said
    assert "\n" not in said


def test_without_ray(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(gapless(model, "--ranks-on-ray", "auto")) == 2
    assert "a cluster needs Ray: pip install 'gapless[ray]'" in capsys.readouterr().err


def test_replicas_keep_their_ranks_on_one_node(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "hello"}\n')
    more = ["--model", str(model), "--tensor-parallel", "2", "--ranks-on-ray", "auto", "--ray"]
    for start in (["run", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")], ["serve"]):
        assert main([*start, *more]) == 2
        assert "--ranks-on-ray is for one engine" in capsys.readouterr().err


def test_versions_that_differ(model: Path, nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.ranks.ray_seats.here", lambda: NodeVersions("99", *astuple(here())[1:]))
    told = refusal(model, nodes, **SPREAD)
    assert re.fullmatch(r"node [0-9.]+ has Gapless \S+ instead of 99; install the same versions on all nodes", told)
