"""`trace`, `compare` and `--trace` as a user calls them, and the summaries that runs end with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from gapless import LLM, AsyncLLM, SamplingParams
from gapless.bench import workload_jobs, workloads
from gapless.bench.workload_rows import Rates, WorkloadRow
from gapless.bench.workloads import WorkloadTask
from gapless.cli import main
from gapless.commands import EXIT_INTERRUPTED
from gapless.errors import ConfigError
from gapless.report import OverlapMeter, idle_line
from gapless.runner.fill import Filled
from gapless.runner.runner import Runner
from tiny import CPU

SMALL = ["--device", "cpu", "--dtype", "float32", "--num-blocks", "64", "--max-tokens", "12", "--ignore-eos"]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    lines = [{"prompt": "Hello, world"}, {"prompt": "abc", "temperature": 0.9}, {"prompt": "0123456789"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def runs_of(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())
    assert path.with_suffix(".html").read_text().startswith("<!doctype html>")
    return found["otherData"]["runs"]


def test_trace_writes_both_depths_into_one_file(
    prompts: str, tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "T.json"
    assert main(["trace", prompts, "--model", str(tiny_dir), "--depth", "1", "2", "-o", str(out), *SMALL]) == 0
    runs = runs_of(out)
    assert [run["label"] for run in runs] == ["depth 1", "depth 2"]
    for run in runs:
        assert run["tokens"] == 36
        assert run["steps"] >= 12
        assert 0 < run["busy_s"] < run["seconds"]
        assert sum(run["idle_by_cause"].values()) == pytest.approx(run["idle_s"])
    printed = capsys.readouterr().out
    assert printed.count("overlap: ") == printed.count("idle: ") == 2
    assert "T.html" in printed


def test_compare_draws_both_and_says_whether_tokens_are_equal(
    prompts: str, tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "C.json"
    flags = ["--width", "90", "--trace", str(out), *SMALL]
    assert main(["compare", prompts, "--model", str(tiny_dir), *flags]) == 0
    assert [run["label"] for run in runs_of(out)] == ["depth 1", "depth 2"]
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert {"depth 1", "depth 2"} <= set(lines)
    assert len([line for line in lines if line[:5] in ("CPU  ", "H2D  ", "GPU  ", "D2H  ")]) == 8
    assert "one character" in printed
    assert "tokens: equal in all 3 prompts" in printed
    for word in ("tokens/s", "GPU idle", "ratio", "wasted tokens"):
        assert word in printed


def test_an_interrupted_trace_is_written_up_to_there(
    prompts: str, tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = LLM.run

    def run(self: LLM, jobs: Any) -> Iterator[Any]:
        all_jobs = list(jobs)
        yield next(iter(original(self, all_jobs)))
        if len(all_jobs) > 1:  # not the warm-up
            raise KeyboardInterrupt

    out, flags = tmp_path / "T.json", ["--model", str(tiny_dir), "--depth", "1", "2", *SMALL]
    with patch.object(LLM, "run", run):
        assert main(["trace", prompts, "-o", str(out), *flags]) == EXIT_INTERRUPTED
        assert "interrupted at depth 1" in capsys.readouterr().err
        assert main(["compare", prompts, *flags]) == EXIT_INTERRUPTED
    (run_,) = runs_of(out)
    assert run_["steps"] >= 12


def test_a_run_that_fails_is_traced_and_told(
    prompts: str, tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Runner.step

    def step(self: Runner, filled: Filled, *rest: Any) -> None:
        if filled.plan.step == 9:
            raise RuntimeError("made to fail")
        original(self, filled, *rest)

    out, flags = tmp_path / "T.json", ["--model", str(tiny_dir), "--depth", "2", "--no-native", *SMALL]
    with patch.object(Runner, "step", step):
        assert main(["trace", prompts, "-o", str(out), *flags]) == 1
        assert main(["compare", prompts, *flags]) == 1
    assert runs_of(out)[0]["ledger"]["step failed"] == 1
    told = capsys.readouterr()
    assert "step failed (1)" in told.out
    assert "prompts that no run failed" in told.out
    assert "made to fail" in told.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trace", "{prompts}", "-o", "/no/such/folder/T.json"], "no such folder"),
        (["trace", "{prompts}", "--depth", "0"], "depth must be a whole number between 1 and 8"),
        (["compare", "{prompts}", "--depth", "1", "two"], "depth"),
        (["compare", "{prompts}", "--trace", "/no/such/folder/T.json"], "no such folder"),
        (["compare", "{prompts}", "--width", "-5"], "width must be at least 20, got -5"),
        (["trace", "{prompts}", "-o", "{folder}"], "is a folder"),
        (["trace", "no/such/file"], "no such file"),
        (["trace", "{bad}"], "line 1: not JSON"),
        (["run", "{prompts}", "--trace", "/no/such/folder/T.json"], "no such folder"),
        (["bench", "offline", "--trace", "/no/such/folder/T.json"], "no such folder"),
    ],
)
def test_wrong_usage_is_one_clear_line(
    arguments: list[str], words: str, prompts: str, tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad").write_text("{broken\n")
    names = {"prompts": prompts, "bad": str(tmp_path / "bad"), "folder": str(tmp_path)}
    assert main([*(word.format(**names) for word in arguments), "--model", str(tiny_dir)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_run_and_generate_end_with_the_summary_and_write_a_trace(
    prompts: str, tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "R.json"
    common = ["--model", str(tiny_dir), "--trace", str(trace), *SMALL]
    assert main(["run", prompts, "--depth", "2", *common]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3].startswith("overlap: ")
    assert printed[-2].startswith("idle: ")
    assert printed[-1].startswith("timeline: ")
    assert runs_of(trace)[0]["tokens"] == 36
    assert main(["generate", "Hello", *common]) == 0
    assert "idle: " in capsys.readouterr().err
    assert runs_of(trace)[0]["tokens"] == 12
    assert runs_of(trace)[0]["label"].startswith("depth auto (")  # both were tried: neither is what it was


def test_both_classes_write_when_closed(tiny_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "L.json"
    with LLM(tiny_dir, **CPU, depth=2, num_blocks=64, trace=str(path)) as llm:
        llm.generate(["Hello", "a"], GREEDY)
        assert not path.exists()
    assert runs_of(path)[0]["tokens"] == 16
    path.unlink()
    llm.close()
    assert not path.exists()  # once is enough

    async def ask() -> None:
        async with AsyncLLM(tiny_dir, **CPU, depth=2, num_blocks=64, trace=str(path)) as llm:
            await llm.generate("Hello", GREEDY)

    asyncio.run(ask())
    assert runs_of(path)[0]["tokens"] == 8


def test_a_trace_nowhere_is_refused_before_loading(tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        LLM(tiny_dir, **CPU, trace="/no/such/folder/T.json")
    with pytest.raises(ConfigError, match="trace must be the name of a file"):
        LLM(tiny_dir, **CPU, trace=3)


def test_the_summary_is_of_what_came_between(tiny_dir: Path) -> None:
    with LLM(tiny_dir, **CPU, depth=1, num_blocks=64) as llm:
        llm.generate(["Hello"], GREEDY)
        meter = OverlapMeter(llm.engine.monitor)
        llm.generate(["Hello", "abc"], GREEDY)
        overlap, idle = meter.summary().splitlines()
    assert overlap.startswith("overlap: 8 steps, ")
    assert idle.startswith("idle: ")
    assert "%" in idle


def test_the_idle_line_names_the_largest_causes_first() -> None:
    idle = {"a": 0.001, "b": 0.5, "c": 0.0, "d": 0.02, "e": 0.03}
    assert idle_line(idle, 10.0) == "idle: 551 ms (5.5%): b 500 ms, e 30 ms, d 20 ms, other 1 ms"
    assert idle_line({"a": 0.0}, 1.0) == "idle: none"


def test_bench_offline_traces_every_depth(tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "B.json"
    flags = ["--num-prompts", "3", "--prompt-tokens", "8", "--max-tokens", "8", "--batch", "2", "--rounds", "1"]
    flags += ["--warmup", "0", "--depth", "1", "2", "--dtype", "float32", "--threads", "1", "--trace", str(out)]
    assert main(["bench", "offline", "--model", str(tiny_dir), *flags]) == 0
    assert [run["label"] for run in runs_of(out)] == ["Gapless depth 1, batch 2", "Gapless depth 2, batch 2"]
    assert [run["tokens"] for run in runs_of(out)] == [24, 24]
    printed = capsys.readouterr().out
    assert "Gapless depth 1, fp32, batch 2: idle: " in printed
    assert "B.html" in printed


def test_gpu_workloads_put_all_depths_into_one_trace(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same code with a tiny model on the CPU in the place of the large one on the GPU."""
    monkeypatch.setitem(workloads.WORKLOADS, "T", workload_jobs.Workload("0.6B", 3, 8, 20))
    monkeypatch.setattr(workload_jobs, "FIRST_TOKEN", 1)
    monkeypatch.setattr(workload_jobs, "END_TOKEN", 90)
    monkeypatch.setattr("gapless.device.pick_device", lambda name: name)

    monkeypatch.setattr(workloads, "measure_rates", lambda: Rates(1e9, 1e9))

    def measure(task: WorkloadTask, rates: Rates, folder: Path, timelines: Any) -> Iterator[WorkloadRow]:
        for depth in task.depths:
            with LLM(tiny_dir, **CPU, depth=depth, num_blocks=64, trace=timelines is not None) as llm:
                yield workloads._time(llm, task.names[0], depth, rates, 0.0, timelines)

    monkeypatch.setattr(workloads, "measure", measure)
    out, table = tmp_path / "W.json", tmp_path / "rows.json"
    plot = tmp_path / "steps.svg"
    flags = ["--depth", "1", "2", "--trace", str(out), "--json", str(table), "--plot", str(plot)]
    assert main(["bench", "offline", "--workload", "T", *flags]) == 0
    runs = runs_of(out)
    assert [run["label"] for run in runs] == ["T, depth 1", "T, depth 2"]
    assert [run["tokens"] for run in runs] == [60, 60]  # without the first run
    assert [run["steps"] for run in runs] == [20, 20]
    assert capsys.readouterr().out.count("idle: ") == 2
    assert json.loads(table.read_text())["rows"][0]["idle_by_cause"]
    assert plot.read_text().count("<rect x=") == 2


def test_a_long_ledger_does_not_flood_the_line(make_llm: Any) -> None:
    monitor = make_llm().engine.monitor
    late = monitor._built.device.late
    for i in range(30):
        late.compiled(f"kernel{i}", 1.0, cached=False)
    line = OverlapMeter(monitor).summary().splitlines()[0]
    assert "after ready: compiled kernel0 (1)" in line
    assert "and 18 more of the ledger" in line
    assert monitor.after_ready()[0] == "outside a step: compiled kernel0, 1.00 s"
    assert len(monitor.timeline().facts["after_ready"]) == 30
