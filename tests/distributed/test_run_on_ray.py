"""`gapless run --ray` on a small cluster: the results of one process, whatever dies in between."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

from gapless.cli import main

NUM_LINES = 60
QUIET = {"object_store_memory": 80_000_000, "include_dashboard": False}
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[2] / "src"))  # for processes of nodes


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """One node, for as long as the tests of this file run."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, **QUIET})
    yield cluster.address
    cluster.shutdown()


class Task:
    """A prompt file, and the commands that complete it with and without a cluster."""

    def __init__(self, folder: Path, model: Path, num_lines: int = NUM_LINES, max_tokens: int = 80) -> None:
        self.prompts, self.wanted, self.out = folder / "in.jsonl", folder / "wanted.jsonl", folder / "out.jsonl"
        self.part = folder / "out.jsonl.part"
        dice = random.Random(3)
        with self.prompts.open("w") as file:
            for index in range(num_lines):
                tokens = [dice.randrange(1, 97) for _ in range(dice.randrange(1, 30))]
                line = {"id": f"row {index}", "prompt": tokens, "temperature": 0.9 * (index % 2)}
                line |= {"temperature": -1} if index % 20 == 7 else {}  # refused
                file.write(json.dumps(line) + "\n")
        engine = ["--device", "cpu", "--dtype", "float32", "--num-blocks", "64", "--max-num-rows", "4"]
        self.options = ["--model", str(model), *engine, "--max-tokens", str(max_tokens), "--num-threads", "1"]

    def command(self, out: Path, *more: str) -> list[str]:
        return ["run", str(self.prompts), "-o", str(out), *self.options, *more]

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "gapless", *self.command(self.out, *more)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def num_kept(self) -> int:
        return self.part.read_bytes().count(b"\n") - 1 if self.part.exists() else 0


@pytest.fixture
def task(tmp_path: Path, tiny_dir: Path) -> Task:
    made = Task(tmp_path, tiny_dir)
    assert main(made.command(made.wanted)) == 1, "some prompts are refused"
    return made


def replicas() -> list[psutil.Process]:
    """Processes of replicas, of any cluster on this machine."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "ray::Replica" in " ".join(process.info["cmdline"] or []):
            found.append(process)
    return found


def wait_for(true: object, most_s: float = 60) -> None:
    end = time.monotonic() + most_s
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_cluster_gives_the_results_of_one_process(
    task: Task, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(task.command(task.out, "--ray", address, "--replicas", "2")) == 1
    assert task.out.read_bytes() == task.wanted.read_bytes()
    assert "2 replicas on Ray" in capsys.readouterr().out


def test_a_killed_driver_and_a_killed_replica_change_nothing(task: Task, address: str) -> None:
    arguments = ["--ray", address, "--replicas", "2"]
    with task.start(*arguments) as first:
        wait_for(lambda: task.num_kept() > 2 or first.poll() is not None)
        first.kill()
    assert 2 < task.num_kept() < NUM_LINES
    with task.start(*arguments) as second:
        before = task.num_kept()
        wait_for(lambda: task.num_kept() > before or second.poll() is not None)
        assert second.poll() is None
        for process in replicas()[:1]:
            process.kill()
        _, said = second.communicate()
        assert second.returncode == 1, said
    assert task.out.read_bytes() == task.wanted.read_bytes()
