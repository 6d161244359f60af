"""The GPU workloads: what they ask for, what they must read, and what is kept of a run that fails."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gapless.bench import workloads
from gapless.bench.kernels import NUM_STEPS, KernelRow, KernelTable, profiled_tokens
from gapless.bench.workload_jobs import WORKLOADS, run_bytes, weight_bytes
from gapless.bench.workloads import WorkloadRow
from gapless.cli import main
from gapless.errors import ConfigError

READ_RATE = 4.40e12


def make_row(**changes: Any) -> WorkloadRow:
    values: dict[str, Any] = {
        "workload": "D", "engine": "Gapless", "seconds": 1.6, "ms_per_step": 1.6, "tokens_per_s": 20000.0,
        "limit_ms": 0.8, "limit_share": 0.5, "start_s": 2.0, "peak_gib": 30.0, "depth": 2, "idle_share": 0.01,
        "host_ms_per_step": 0.2,
    }  # fmt: skip
    return WorkloadRow(**{**values, **changes})


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.device.pick_device", lambda name: name)


@pytest.mark.parametrize(
    ("name", "limit_ms"), [("A", 60.9e3 / 8192), ("B", 4.02), ("C", 3.42), ("D", 0.80), ("E", 4.54), ("F", 0.28)]
)
def test_limits_are_those_that_were_worked_out_by_hand(name: str, limit_ms: float) -> None:
    work = WORKLOADS[name]
    found = run_bytes(work, work.prompts(), work.max_tokens) / READ_RATE / work.max_tokens * 1e3
    assert found == pytest.approx(limit_ms, rel=0.02)


def test_weights_of_a_tied_model_are_read_once() -> None:
    assert weight_bytes("0.6B") == pytest.approx(2 * 0.596e9, rel=0.01)
    assert weight_bytes("8B") == pytest.approx(2 * (8.03e9 - 128256 * 4096), rel=0.01)


def test_prompts_are_the_same_every_time_and_as_long_as_they_should_be() -> None:
    work = WORKLOADS["D"]
    assert work.prompts() == work.prompts() != work.prompts(seed=1)
    assert {len(prompt) for prompt in work.prompts()} == {128}
    assert {len(prompt) for prompt in work.halfway()} == {128 + 512}
    mixed = WORKLOADS["M"]
    assert len({len(prompt) for prompt in mixed.prompts()}) > 100
    assert 16 <= min(mixed.counts()) < max(mixed.counts()) <= mixed.max_tokens


@pytest.mark.parametrize("name", [name for name, work in WORKLOADS.items() if not work.mixed])
def test_a_profiled_run_is_of_all_rows_and_fits_into_the_model(name: str) -> None:
    """The first request still decodes when the last one has come in and the steps that count are over."""
    work = WORKLOADS[name]
    prompts = work.halfway()
    assert len(prompts) == work.max_num_rows
    most = 8192 - len(prompts)  # of a prompt's tokens in a step, by default, beside all that decode
    num_prefills = math.ceil(sum(map(len, prompts)) / most)
    max_tokens = profiled_tokens(len(prompts))
    assert max_tokens - num_prefills >= NUM_STEPS + 1
    assert len(prompts[0]) + max_tokens <= work.length


def test_steps_are_profiled_after_each_run_and_a_profile_that_fails_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = KernelTable(23, 1600.0, 3.0, ())
    given: list[int] = []

    def profile(llm: Any, prompts: list[list[int]]) -> KernelTable:
        given.append(len(prompts))
        if len(prompts) == 1:
            raise ValueError("the profiler saw 0 decode steps begin and 0 end")
        return table

    monkeypatch.setattr("gapless.LLM", lambda *_, **__: nullcontext())
    monkeypatch.setattr("gapless.device.cuda.CudaDevice", lambda: SimpleNamespace(read_rate=lambda: READ_RATE))
    monkeypatch.setattr(workloads, "_time", lambda llm, name, *_: make_row(workload=name))
    monkeypatch.setattr(workloads, "profile_decode", profile)
    rows = list(workloads.measure(["D", "F", "M"], [2], tmp_path, kernels=True))
    assert [row.kernels for row in rows if isinstance(row, WorkloadRow)] == [
        table,
        "the profiler saw 0 decode steps begin and 0 end",
        "not profiled, for hardly two steps are alike",
    ]
    assert given == [32, 1]
    assert [row.kernels for row in workloads.measure(["D"], [2], tmp_path) if isinstance(row, WorkloadRow)] == [None]


def test_what_was_measured_is_kept_when_a_later_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    def measure(*_: Any, **__: Any) -> Iterator[WorkloadRow]:
        yield make_row()
        raise RuntimeError("the second one failed")

    monkeypatch.setattr(workloads, "measure", measure)
    path, plot = tmp_path / "rows.json", tmp_path / "steps.svg"
    with pytest.raises(RuntimeError, match="the second one failed"):
        workloads.main(["D", "E"], [2], json_path=str(path), plot_path=str(plot))
    assert [row["workload"] for row in json.loads(path.read_text())["rows"]] == ["D"]
    assert plot.read_text().count("<rect x=") == 1


def test_unknown_workloads_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown 'Z'; known: A, B, C, D, E, F, M"):
        workloads.main(["D", "Z"], [2])


def test_a_peer_that_fails_is_a_line_and_kernels_are_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_gpu: None
) -> None:
    asked: dict[str, bool] = {}

    def measure(*_: Any, **flags: bool) -> Iterator[WorkloadRow | str]:
        asked.update(flags)
        yield make_row(kernels=KernelTable(23, 1600.0, 3.0, (KernelRow("decode", 28.0, 25.0, 700.0),)))
        yield "transformers generate_batch, D: failed: RuntimeError: no room"

    monkeypatch.setattr(workloads, "measure", measure)
    monkeypatch.setattr(workloads, "is_installed", lambda: True)
    path = tmp_path / "rows.json"
    assert main(["bench", "offline", "--workload", "D", "--peers", "--kernels", "--json", str(path)]) == 0
    assert asked == {"peers": True, "kernels": True}
    out = capsys.readouterr().out
    assert "failed: RuntimeError: no room" in out
    assert "kernels of D, Gapless, depth 2: 23 steps of 1600 µs, 28 kernels each; none ran for 3.0 µs" in out
    (row,) = json.loads(path.read_text())["rows"]
    assert row["kernels"]["rows"][0] == {
        "name": "decode",
        "calls_per_step": 28.0,
        "us_per_call": 25.0,
        "us_per_step": 700.0,
    }
