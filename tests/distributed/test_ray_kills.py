"""Runs on a cluster of several nodes in which replicas, nodes, the driver and the head are killed at random."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from ray_tasks import NODE, Task, replicas

SEED = 11
KILLS = ["replica"] * 12 + ["node"] * 8 + ["driver"] * 8 + ["head"] * 3
HEAD_S = 120  # a driver whose head has gone ends within this time
STALL_S = 120


class Victims:
    """A cluster, the driver of a run on it, and how each of them dies."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.cluster = self._cluster()
        self.driver = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        return self.task.start("--ray", self.cluster.address, "--replicas", "2")

    def kill_replica(self, dice: random.Random) -> None:
        while not (found := replicas(self.cluster.address)) and self.driver.poll() is None:
            time.sleep(0.02)
        if found:
            dice.choice(found).kill()

    def kill_node(self, dice: random.Random) -> None:
        """A new one takes its place."""
        self.cluster.remove_node(dice.choice(sorted(self.cluster.worker_nodes, key=id)), allow_graceful=False)
        self._add_node()

    def kill_driver(self, dice: random.Random) -> None:
        self.driver.kill()
        self.driver.wait()

    def kill_head(self, dice: random.Random) -> None:
        """The driver must end by itself, with the run or without; a new cluster takes the place of the old one."""
        self.cluster.remove_node(self.cluster.head_node, allow_graceful=False)
        began = time.monotonic()
        self.driver.wait(HEAD_S)
        done = "the run was complete" if self.task.out.exists() else f"{self.task.num_kept()} results are kept"
        print(f"the driver ended {time.monotonic() - began:.1f} s after the head: {self.driver.returncode}, {done}")
        self.close()
        self.cluster = self._cluster()

    def close(self) -> None:
        for node in self.cluster.list_all_nodes():
            self.cluster.remove_node(node, allow_graceful=False)

    def _cluster(self) -> Any:
        self.cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
        for _ in range(3):
            self._add_node()
        return self.cluster

    def _add_node(self) -> None:
        self.cluster.add_node(num_cpus=1, object_store_memory=NODE["object_store_memory"])


def wait_for_results(victims: Victims, count: int) -> None:
    """Until some more are kept, or the driver has ended."""
    wanted = victims.task.num_kept() + count
    end = time.monotonic() + STALL_S
    while victims.driver.poll() is None and victims.task.num_kept() < wanted:
        assert time.monotonic() < end, "the run stands still"
        time.sleep(0.02)


@pytest.mark.slow
def test_kills_change_nothing(tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")  # without a head, nodes end soon
    dice = random.Random(SEED)
    kills = dice.sample(KILLS, len(KILLS))
    task = Task(tmp_path, tiny_dir, 600, 80)
    victims = Victims(task)
    num_runs = 0
    try:
        while kills:
            wait_for_results(victims, dice.randrange(12))
            time.sleep(dice.random())
            if victims.driver.poll() is None:
                kind = kills.pop()
                print(f"{time.monotonic():.1f} {task.num_kept()} results: kill {kind}", flush=True)
                getattr(victims, f"kill_{kind}")(dice)
            if victims.driver.poll() == 1 and task.out.exists():  # all are complete, some of them with their error
                num_runs += 1
                task.check()
                task.out.unlink()
                task.part.unlink()
            if victims.driver.poll() is not None:
                victims.driver = victims.start()
        victims.driver.wait(600)
        if not task.out.exists():
            victims.driver = victims.start()
            victims.driver.wait(600)
        assert victims.driver.returncode == 1
        task.check()
        print(f"{num_runs + 1} runs")
    finally:
        victims.driver.kill()
        victims.close()
