"""A server with replicas on a cluster of several nodes: engines, replicas and nodes are killed under streams, and all
replicas are replaced under load. No stream loses a token, has one twice, or fails."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster
from ray_tasks import NODE, wait_for
from test_serve_on_ray import Server, read, running, served

from tiny import write_tiny

SEED = 7
KILLS = ["engine"] * 12 + ["replica"] * 13 + ["node"] * 6
NUM_READERS, NUM_SEEDS = 6, 12
MOST_UP_S = 120  # for enough replicas to be there again
RESTART_S = 300  # for all replicas to be replaced


class Readers:
    """Clients that read one stream after the other, and compare each with the undisturbed one."""

    def __init__(self, server: Server, wanted: list[str]) -> None:
        self._server, self._wanted = server, wanted
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self.num_read, self.longest_s = 0, 0.0
        self.faults: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(NUM_READERS)]

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            number, began = next(self._numbers) % NUM_SEEDS, time.monotonic()
            try:
                if read(self._server, number) != self._wanted[number]:
                    self.faults.append(f"stream {number} differs")
            except Exception as error:
                self.faults.append(f"stream {number}: {error!r}")
            self.num_read += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began)


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A head without room for replicas, and three nodes with room for one each."""
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
    for _ in range(3):
        add_node(cluster)
    yield cluster
    for node in cluster.list_all_nodes():
        cluster.remove_node(node, allow_graceful=False)


def add_node(cluster: Any) -> None:
    cluster.add_node(num_cpus=1, object_store_memory=NODE["object_store_memory"])


def strike(kind: str, cluster: Any, server: Server, dice: random.Random) -> None:
    if kind == "node":
        cluster.remove_node(dice.choice(sorted(cluster.worker_nodes, key=id)), allow_graceful=False)
        add_node(cluster)
        return
    victims = served(cluster.address)
    if kind == "engine":
        victims = [child for victim in victims for child in victim.children() if "engine_process" in child.cmdline()[2]]
    os.kill(dice.choice(victims).pid, signal.SIGKILL)


def wait_up(server: Server, count: int) -> None:
    deadline = time.monotonic() + MOST_UP_S
    while server.metric("gapless_engine_up") < count:
        assert time.monotonic() < deadline, "no replica came back"
        time.sleep(0.1)


@pytest.mark.slow
def test_no_stream_notices_kills_and_restarts(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, nodes: Any
) -> None:
    model = write_tiny(tmp_path_factory.mktemp("long"), max_position_embeddings=2048)
    dice = random.Random(SEED)
    flags = ("--served-model-name", "tiny", "--num-blocks", "1024", "--replicas", "3", "--ray", nodes.address)
    with running(tmp_path / "log.jsonl", model, *flags) as server:
        wait_up(server, 3)
        wanted = [read(server, number) for number in range(NUM_SEEDS)]
        with Readers(server, wanted) as readers:
            for kind in dice.sample(KILLS, len(KILLS)):
                wait_up(server, 2)
                time.sleep(dice.random())
                try:
                    strike(kind, nodes, server, dice)
                except (psutil.Error, ProcessLookupError, IndexError):  # it died a moment ago, or starts
                    strike("node", nodes, server, dice)
                print(f"{time.monotonic():.1f} {readers.num_read} streams, kill {kind}", flush=True)
                assert readers.faults == []
            wait_up(server, 3)
            before = {process.pid for process in served(nodes.address)}
            server.process.send_signal(signal.SIGUSR1)
            num_before = readers.num_read
            wait_for(lambda: not before & {process.pid for process in served(nodes.address)}, RESTART_S)
            wait_up(server, 3)
            print(
                f"{readers.num_read - num_before} streams during the restart; "
                f"the longest of all took {readers.longest_s:.1f} s"
            )
        assert readers.faults == []
        assert readers.num_read > len(KILLS)
        assert server.metric('gapless_requests_total{outcome="length"}') == readers.num_read + NUM_SEEDS
