"""`gapless run --ray` and `Generator` on a small cluster: the results of one process, whatever dies in between."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray_tasks import Task, replicas, wait_for

import gapless
from gapless import LLM, SamplingParams
from gapless.cli import main
from gapless.distributed.replica import Replica
from gapless.ray import Generator
from tiny import CPU


def test_a_killed_replica_changes_nothing(task: Task, address: str) -> None:
    with task.start("--ray", address, "--replicas", "2") as driver:
        wait_for(lambda: task.num_kept() > 2 or driver.poll() is not None)
        for process in replicas(address)[:1]:
            process.kill()
        assert driver.wait() == 1, task.said.read_text()
        assert "a replica was lost and is replaced" in task.said.read_text()
    task.check()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
def test_an_interrupted_driver_goes_on(task: Task, address: str, number: signal.Signals) -> None:
    """Also without a cluster: the part file is the same."""
    with task.start("--ray", address) as driver:
        wait_for(lambda: task.num_kept() > 2 or driver.poll() is not None)
        driver.send_signal(number)
        assert driver.wait() == (-9 if number is signal.SIGKILL else 130)
        assert ("Run the same command again to resume" in task.said.read_text()) == (number is signal.SIGINT)
    kept = task.num_kept()
    assert 2 < kept < task.num_lines
    assert main(task.command(task.out, *(["--ray", address] if number is signal.SIGINT else []))) == 1
    task.check()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ray", "127.0.0.1:1"], "no Ray cluster answers there"),
        (["--ray", "nowhere.invalid:6379"], "no Ray cluster answers there"),
        (["--ray", "in.jsonl"], "an address is HOST:PORT"),
        (["--ray", "ray://head:10001"], "run this command on a node"),
        (["--replicas", "2"], "--replicas needs --ray"),
        (["--ray", "--replicas", "0"], "--replicas must be at least 1"),
        (["--ray", "--gpus-per-replica", "-1"], "--gpus-per-replica must be 0 or more"),
        (["--ray", "--trace", "t.json"], "--trace is for one engine"),
    ],
)
def test_wrong_flags(task: Task, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(task.command(task.out, *flags)) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("gapless: ")
    assert said in told


def test_no_ray(task: Task, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(task.command(task.out, "--ray")) == 2
    assert "pip install 'gapless[ray]'" in capsys.readouterr().err


def test_too_few_gpus(task: Task, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(task.command(task.out, "--ray", address, "--gpus-per-replica", "1")) == 2
    assert "too few GPUs: 1 replica needs 1 each on one node, and the cluster has 0" in capsys.readouterr().err


def test_nodes_must_have_the_versions_of_the_driver(
    task: Task, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = gapless.__version__
    monkeypatch.setattr(gapless, "__version__", "99.0")
    assert main(task.command(task.out, "--ray", address)) == 2
    assert f"has Gapless {real} instead of 99.0; install the same versions" in capsys.readouterr().err


def test_a_pipeline_of_ray_data(address: str, tmp_path: Path, tiny_dir: Path, tiny_llm: LLM) -> None:
    options = {**CPU, "num_blocks": 64, "max_num_rows": 4, "num_threads": 1}
    prompts = [f"prompt {number}" for number in range(24)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    ray.init(address=address, log_to_driver=False)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        ray.data.read_json(str(tmp_path / "in.jsonl")).map_batches(
            Generator,
            fn_constructor_kwargs={"model": str(tiny_dir), "params": {"max_tokens": 6, "temperature": 0}, **options},
            batch_size=4,
            compute=ray.data.ActorPoolStrategy(size=1, max_concurrent_calls_per_actor=4),
        ).write_parquet(str(tmp_path / "out"))
    finally:
        ray.shutdown()
    found = pq.read_table(tmp_path / "out").to_pylist()
    wanted = tiny_llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0))
    assert [(each["prompt"], each["text"]) for each in found] == [
        (prompt, each.text) for prompt, each in zip(prompts, wanted, strict=True)
    ]


def test_results_come_before_their_piece_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """So an interrupted run keeps them. Here the second line ends when the result of the first has been seen."""
    seen = threading.Event()

    class TwoLines:
        def __init__(self, *setup: object) -> None:
            pass

        def do(self, lines: list[int], keep: Callable[[int, dict[str, int], int], None]) -> None:
            keep(lines[0], {"index": lines[0]}, 5)
            assert seen.wait(30)
            keep(lines[1], {"index": lines[1]}, 6)

    monkeypatch.setattr("gapless.distributed.replica.LineWork", TwoLines)
    replica: Any = Replica()
    replica._llm = replica._dialect = replica._sampling = None
    results = replica.complete([3, 4])
    assert next(results) == [({"index": 3}, 5)]
    seen.set()
    assert list(results) == [[({"index": 4}, 6)]]


@pytest.mark.slow
def test_other_formats_retries_and_restarts_on_a_cluster(
    tmp_path: Path, tiny_dir: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file is that of one process: an OpenAI batch with errors that are retried, and Parquet, run twice."""
    engine = ["--model", str(tiny_dir), *("--device", "cpu", "--dtype", "float32", "--num-blocks", "64")]
    engine += ["--max-num-rows", "4", "--num-threads", "1"]
    batch, table = tmp_path / "batch.jsonl", tmp_path / "in.parquet"
    with batch.open("w") as file:
        for number in range(20):
            body = {"model": tiny_dir.name, "prompt": f"prompt {number}", "max_tokens": 8 if number % 5 else -1}
            row = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(row) + "\n")
    pq.write_table(pa.table({"prompt": [f"prompt {number}" for number in range(20)]}), table)

    def run(source: Path, out: Path, *flags: str) -> int:
        more = ["--max-tokens", "8"] if source is table else []
        return main(["run", str(source), "-o", str(out), *engine, *more, *flags])

    there = ["--ray", address, "--replicas", "2"]
    alone, both = tmp_path / "alone.jsonl", tmp_path / "both.jsonl"
    assert run(batch, alone) == run(batch, both, *there) == 1
    assert run(batch, both, *there, "--retry-errors") == 1
    ids = [{**json.loads(line), "id": "", "response": None} for line in both.read_text().splitlines()]
    assert ids == [{**json.loads(line), "id": "", "response": None} for line in alone.read_text().splitlines()]
    assert run(table, tmp_path / "alone.parquet") == run(table, tmp_path / "both.parquet", *there) == 0
    wanted = pq.read_table(tmp_path / "alone.parquet")
    assert pq.read_table(tmp_path / "both.parquet").equals(wanted)
    assert run(table, tmp_path / "both.parquet", *there, "--restart") == 0
    assert pq.read_table(tmp_path / "both.parquet").equals(wanted)
