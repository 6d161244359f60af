"""A peer does the same jobs in a process of its own; one that fails, or is too slow to wait for, is said to be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gapless
from gapless.bench import peer_worker, workload_peers, workloads
from gapless.bench.peer_worker import Transformers, drain, run_job
from gapless.bench.workload_jobs import SHAPES, WORKLOADS
from gapless.bench.workload_peers import PeerPlace, measure_peer
from gapless.bench.workload_rows import Rates, WorkloadRow
from gapless.cli import main

RATES = Rates(4.40e12, 700e12)
STUB = """
import os, sys, time
__version__ = "9.9"
print("loading", flush=True)
os.write(1, b"@peer noise of a library\\n")

class SamplingParams:
    def __init__(self, **values):
        self.values = values

class LLM:
    def __init__(self, **options):
        assert "gapless" not in sys.modules
        assert not any(path.endswith("bench") for path in sys.path), sys.path
        with open(os.environ["NOTES"], "a") as notes:
            print("start", sorted(options.items()), os.path.exists(options["model"] + "/config.json"), file=notes)
        if os.environ.get("REFUSE"):
            raise ValueError("no kernel image\\nfor this device")

    def generate(self, prompts, params, use_tqdm):
        print("noise")
        with open(os.environ["NOTES"], "a") as notes:
            print("run", len(prompts), len(prompts[0]["prompt_token_ids"]), params[0].values, file=notes)
        trouble = os.environ.get("TROUBLE_" + str(len(prompts)))
        if trouble == "die":
            print("out of luck", file=sys.stderr)
            os._exit(7)
        if trouble == "hang":
            time.sleep(60)
        if trouble == "raise":
            raise RuntimeError("no room")
        counts = [p.values["max_tokens"] - (trouble == "short") for p in params]
        return [type("R", (), {"outputs": [type("O", (), {"token_ids": [1] * n})]}) for n in counts]
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PeerPlace:
    """A stand-in for vLLM, on a path of its own."""
    folder = tmp_path / "site"
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(STUB)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setattr(workload_peers, "device_memory", lambda: 5 * 2**30)
    return PeerPlace("vllm", pythonpath=str(folder))


def results(place: PeerPlace, tmp_path: Path, *names: str) -> list[WorkloadRow | str]:
    return list(measure_peer(place, tmp_path, dict.fromkeys(names, 1.0), RATES, tmp_path / "log", held=2 * 2**30))


def notes(tmp_path: Path) -> list[str]:
    return (tmp_path / "notes").read_text().splitlines()


def test_a_peer_does_the_same_job_twice(vllm: PeerPlace, tmp_path: Path) -> None:
    rows = results(vllm, tmp_path, "L", "S")
    assert all(isinstance(row, WorkloadRow) for row in rows)
    for row in rows:
        assert isinstance(row, WorkloadRow)
        assert (row.engine, row.depth, row.peak_gib) == ("vLLM 9.9", None, 3.0)
        assert row.first_s > 0 < row.seconds
        assert row.start_s > 0
    start, *runs = notes(tmp_path)
    assert "('load_format', 'dummy'), ('max_model_len', 1152), ('max_num_seqs', 32)" in start
    assert start.endswith("True")
    common = "'ignore_eos': True, 'detokenize': False"
    assert runs == [
        *[f"run 32 128 {{'max_tokens': 256, {common}, 'temperature': 0.0, 'logprobs': 5}}"] * 2,
        *[f"run 32 128 {{'max_tokens': 1024, {common}, 'temperature': 1.0, 'top_k': 50, 'top_p': 0.95}}"] * 2,
    ]
    assert "noise" in (tmp_path / "log").read_text()  # and not among the answers


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("die", "ended with exit code 7: out of luck"),
        ("raise", "RuntimeError: no room"),
        ("hang", "no answer within 3 s"),
        ("short", "RuntimeError: 224 tokens came out instead of 256"),
    ],
)
def test_after_trouble_the_next_job_gets_a_new_process(
    vllm: PeerPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, words: str
) -> None:
    monkeypatch.setenv("TROUBLE_32", trouble)
    monkeypatch.setitem(WORKLOADS, "L", replace(WORKLOADS["L"], max_tokens=8))
    monkeypatch.setattr(workload_peers, "PATIENCE_S", 3)
    monkeypatch.setattr(workload_peers, "PATIENCE", 1)
    failed, row = results(vllm, tmp_path, "L", "F")
    assert failed == f"vLLM, L: failed: {words}"
    assert isinstance(row, WorkloadRow)
    assert [line.split()[0] for line in notes(tmp_path)].count("start") == 2


def test_a_peer_that_cannot_start_is_asked_once(
    vllm: PeerPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSE", "1")
    assert results(vllm, tmp_path, "D", "F") == ["vLLM, D: failed: ValueError: for this device"]
    nowhere = replace(vllm, pythonpath=str(tmp_path))
    (text,) = results(nowhere, tmp_path, "D")
    assert text == "vLLM, D: failed: ModuleNotFoundError: No module named 'vllm'"


def test_noise_before_the_worker_has_its_output_is_skipped(vllm: PeerPlace, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho welcome\necho\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (row,) = results(replace(vllm, python=str(python)), tmp_path, "F")
    assert isinstance(row, WorkloadRow)


def test_one_command_runs_both_engines(
    vllm: PeerPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours on the CPU with a small model, then the stand-in with the same config: one table, one file, one plot."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
             "head_dim": 32, "intermediate_size": 32, "vocab_size": 30000}  # fmt: skip
    monkeypatch.setitem(SHAPES, "0.6B", {**SHAPES["0.6B"], **sizes})
    monkeypatch.setitem(WORKLOADS, "D", replace(WORKLOADS["D"], num_requests=2, prompt_tokens=8, max_tokens=5))
    engine = gapless.LLM
    on_cpu = {"device": "cpu", "num_blocks": 16}
    monkeypatch.setattr(gapless, "LLM", lambda path, **options: engine(path, **{**options, **on_cpu}))
    monkeypatch.setattr("gapless.device.pick_device", lambda name: name)
    monkeypatch.setattr(workloads, "measure_rates", lambda: RATES)
    monkeypatch.setattr(workloads, "device_memory", lambda: 2**30)
    freed: list[bool] = []
    monkeypatch.setattr(workloads, "_free_device", lambda: freed.append(not (tmp_path / "notes").exists()))
    path, plot = tmp_path / "rows.json", tmp_path / "bars.svg"
    flags = ["--depth", "2", "--peer-python", sys.executable, "--peer-pythonpath", str(vllm.pythonpath)]
    files = ["--json", str(path), "--plot", str(plot), "--logs", str(tmp_path / "logs")]
    assert main(["bench", "offline", "--workload", "D", *flags, *files]) == 0
    assert [row["engine"] for row in json.loads(path.read_text())["rows"]] == ["Gapless", "vLLM 9.9"]
    assert plot.read_text().count("<rect x=") == 2
    assert "D vLLM 9.9 " in capsys.readouterr().out
    assert freed == [True]  # before the peer started
    assert [line.name for line in (tmp_path / "logs").iterdir()] == ["0.6B-vllm.log"]
    assert notes(tmp_path)[1].startswith("run 2 8 {'max_tokens': 5")


def test_transformers_is_not_asked_for_what_it_cannot_do(vllm: PeerPlace, tmp_path: Path) -> None:
    (text,) = results(PeerPlace("transformers"), tmp_path, "L")
    assert text == "transformers, L: not run: it returns no log-probabilities of other tokens"
    assert not (tmp_path / "log").exists()


def test_the_worker_needs_nothing_of_ours() -> None:
    code = f"import runpy, sys; runpy.run_path({peer_worker.__file__!r}); sys.exit('gapless' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-S", "-c", code], check=True, env=environment)


class Manager:
    """As much of transformers' manager as is used: gives back what it was told, then nothing."""

    def __init__(self, *results: Any, runs: bool = True) -> None:
        self._results = list(results)
        self._runs = runs
        self.asked: list[Any] = []

    def add_requests(self, **asked: Any) -> None:
        self.asked.append(asked)

    def add_request(self, prompt: list[int], max_new_tokens: int) -> None:
        self.asked.append((prompt, max_new_tokens))

    def get_result(self, timeout: float) -> Any:
        return self._results.pop(0) if self._results else None

    def is_running(self) -> bool:
        return self._runs


def result(count: int, *, error: str | None = None, finished: bool = True) -> Any:
    return SimpleNamespace(generated_tokens=[1] * count, error=error, is_finished=lambda: finished)


def test_tokens_of_all_requests_are_counted() -> None:
    manager = Manager(result(2, finished=False), result(3), None, result(4))
    assert drain(manager, [[1], [2]], [4, 4]) == 7
    assert manager.asked == [{"inputs": [[1], [2]], "max_new_tokens": 4}]
    mixed = Manager(result(3), result(4), runs=False)  # results that wait are taken though the thread has ended
    assert drain(mixed, [[1], [2]], [3, 4]) == 7
    assert mixed.asked == [([1], 3), ([2], 4)]


def test_errors_of_a_peer_are_raised() -> None:
    with pytest.raises(RuntimeError, match="no room"):
        drain(Manager(result(0, error="no room")), [[1]], [4])
    with pytest.raises(RuntimeError, match="the generation thread ended"):
        drain(Manager(runs=False), [[1]], [4])


@pytest.mark.parametrize("counts", [[5, 5], [5, 3]])
def test_transformers_does_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: list[int]) -> None:
    """The real one, on the CPU, with a small cache: by itself it would take most of the memory there is."""
    pytest.importorskip("transformers")
    generation: Any = import_module("transformers.generation")
    small = partial(generation.ContinuousBatchingConfig, num_blocks=16, max_batch_tokens=32)
    monkeypatch.setattr(generation, "ContinuousBatchingConfig", small)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    config = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    peer = Transformers({"model": str(tmp_path), "device": "cpu"})
    job = {"prompts": [[4, 5, 6], [7, 8, 9]], "counts": counts, "sampling": {"temperature": 0.0}, "max_num_rows": 2}
    found = run_job(peer, job)
    assert len(found["seconds"]) == 2
    assert "paged" in found["note"]
    sampled = {"temperature": 1.0, "top_k": 5, "top_p": 0.9}
    assert len(run_job(peer, {**job, "sampling": sampled})["seconds"]) == 2
