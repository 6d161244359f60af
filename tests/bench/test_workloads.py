"""The GPU workloads: what they ask for, what they must compute, and what is kept of a run that fails."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gapless
from gapless.bench import workloads
from gapless.bench.kernels import NUM_STEPS, KernelRow, KernelTable, profiled_tokens
from gapless.bench.workload_jobs import SHAPES, WORKLOADS, decode_bytes, prefill_operations, weight_bytes
from gapless.bench.workload_peers import PeerPlace
from gapless.bench.workload_rows import HEADER, Rates, WorkloadRow, chart_groups, format_row, timed_row
from gapless.bench.workloads import WorkloadTask, measure
from gapless.cli import main
from gapless.errors import ConfigError

RATES = Rates(4.40e12, 700e12)


def make_row(name: str = "D", **changes: Any) -> WorkloadRow:
    values: dict[str, Any] = {"depth": 2, "idle_share": 0.01, "host_ms_per_step": 0.2, **changes}
    return replace(timed_row(name, "Gapless", 2.0, 1.6, RATES, start_s=2.0, peak_gib=30.0), **values)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.device.pick_device", lambda name: name)
    monkeypatch.setattr(workloads, "measure_rates", lambda: RATES)


def test_without_a_gpu_the_refusal_names_the_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gapless.device.cuda.is_available", lambda: False)
    assert main(["bench", "offline", "--workload", "D"]) == 2
    assert capsys.readouterr().err == "gapless: --workload needs an NVIDIA GPU; torch finds none here\n"


@pytest.mark.parametrize(
    ("name", "limit_ms"), [("A", 60.9e3 / 8192), ("B", 4.02), ("C", 3.42), ("D", 0.80), ("E", 4.54), ("F", 0.28)]
)
def test_limits_are_those_that_were_worked_out_by_hand(name: str, limit_ms: float) -> None:
    work = WORKLOADS[name]
    found = decode_bytes(work, work.prompts()) / RATES.bytes_per_s / work.max_tokens * 1e3
    assert found == pytest.approx(limit_ms, rel=0.02)


def test_operations_of_prompts_are_those_of_products_and_of_causal_attention() -> None:
    """8B: 218 million weights in a layer's products; attention multiplies queries with keys and weights with values."""
    products = 2 * 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) * 8 * 8000
    attention = 2 * 2 * 32 * 32 * 128 * 8 * (8000 * 8001 / 2)
    work = WORKLOADS["G"]
    assert prefill_operations(work, work.prompts()) == pytest.approx(products + attention, rel=1e-12)
    assert decode_bytes(work, work.prompts()) == 0  # the only token of each request is its prefill's
    assert RATES.limit_s(work, work.prompts()) == pytest.approx(1.47, rel=0.01)


def test_weights_of_a_tied_model_are_read_once() -> None:
    assert weight_bytes("0.6B") == pytest.approx(2 * 0.596e9, rel=0.01)
    assert weight_bytes("30B-A3B") == pytest.approx(2 * 3.04e9, rel=0.01)  # 8 of 128 experts
    assert weight_bytes("30B-A3B", 32) == pytest.approx(2 * 26.4e9, rel=0.01)  # 112 of them, as expected
    assert weight_bytes("8B") == pytest.approx(2 * (8.03e9 - 128256 * 4096), rel=0.01)


def test_prompts_are_the_same_every_time_and_as_long_as_they_should_be() -> None:
    work = WORKLOADS["D"]
    assert work.prompts() == work.prompts()
    assert {len(prompt) for prompt in work.prompts()} == {128}
    assert {len(prompt) for prompt in work.halfway()} == {128 + 512}
    assert work.num_steps == 1024
    for name, low in (("M", 16), ("X", 64)):
        mixed = WORKLOADS[name]
        lengths = [len(prompt) for prompt in mixed.prompts()]
        assert len(set(lengths)) > 100
        assert low <= min(lengths) < max(lengths) <= mixed.prompt_tokens
        assert low <= min(mixed.counts()) < max(mixed.counts()) <= mixed.max_tokens
        assert sum(mixed.counts()) / mixed.max_num_rows < mixed.num_steps < 2 * sum(mixed.counts()) / mixed.max_num_rows


def test_workloads_fit_into_their_models() -> None:
    for work in WORKLOADS.values():
        shape = SHAPES[work.shape]
        assert work.length <= shape["max_position_embeddings"]
        assert max(map(max, work.prompts())) < shape["vocab_size"]


@pytest.mark.parametrize("name", [name for name, work in WORKLOADS.items() if work.is_steady])
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
    monkeypatch.setattr(workloads, "_time", lambda llm, name, *_: make_row(name))
    monkeypatch.setattr(workloads, "profile_decode", profile)
    rows = list(measure(WorkloadTask(("D", "F", "M"), (2,), kernels=True), RATES, tmp_path))
    assert [row.kernels for row in rows if isinstance(row, WorkloadRow)] == [
        table,
        "the profiler saw 0 decode steps begin and 0 end",
        "not profiled, because few steps are alike",
    ]
    assert given == [32, 1]
    (row,) = measure(WorkloadTask(("D",), (2,)), RATES, tmp_path)
    assert isinstance(row, WorkloadRow)
    assert row.kernels is None


TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
        "intermediate_size": 64, "vocab_size": 31000}  # fmt: skip


def test_the_engine_runs_each_workload_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one, on the CPU, with small models and fewer tokens."""
    small = {"num_requests": 3, "prompt_tokens": 40, "max_tokens": 6}
    for name in ("L", "S"):
        monkeypatch.setitem(WORKLOADS, name, replace(WORKLOADS[name], **small))
    monkeypatch.setitem(WORKLOADS, "X", replace(WORKLOADS["X"], **small, num_rows=2, least_prompt=9, least_answer=2))
    for shape in SHAPES:
        monkeypatch.setitem(SHAPES, shape, {**SHAPES[shape], **TINY})
    asked: list[dict[str, Any]] = []
    engine = gapless.LLM

    def make(path: Path, **options: Any) -> Any:
        asked.append(options)
        return engine(path, **{**options, "device": "cpu", "num_blocks": 64})

    monkeypatch.setattr(gapless, "LLM", make)
    task = WorkloadTask(("L", "S", "X"), (2, "auto"), batch_invariant=True)
    rows = [row for row in measure(task, RATES, tmp_path) if isinstance(row, WorkloadRow)]
    assert [row.workload for row in rows] == ["L", "S", "L", "S", "X", "X"]
    assert [(options["depth"], options["max_num_rows"], options["max_model_len"]) for options in asked] == [
        (2, 3, 46), ("auto", 3, 46), (2, 2, 46), ("auto", 2, 46)
    ]  # fmt: skip
    assert all(options["batch_invariant"] for options in asked)
    for row in rows:
        assert row.first_s > 0 < row.seconds
        assert row.num_steps is not None
        assert row.num_steps >= WORKLOADS[row.workload].num_steps
        assert row.label.startswith("Gapless, batch-invariant, depth ")
        if row.depth == 2:
            assert row.first_ledger == row.ledger == {"pipeline ran dry: everything is in flight": 1}
    assert "depth at the end: " in format_row(rows[-1])


def test_the_table_and_the_chart_use_the_unit_of_each_workload() -> None:
    row, long = make_row("D"), make_row("G", first_ledger={"no graph: prefill": 3})
    width = HEADER.index("limit") + len("limit")
    assert HEADER[:width].split()[-3:] == ["first", "again", "limit"]
    assert format_row(row)[:width].split()[-4:-1] == ["ms/step", "1.953", "1.562"]
    assert format_row(long).splitlines()[0][:width].split()[-4:-1] == ["s", "2.000", "1.600"]
    assert format_row(long).splitlines()[1].strip() == "ledger, first: no graph: prefill 3"
    groups = chart_groups([row, long])
    assert [round(group.bars[0].value, 4) for group in groups] == [1.5625, 1.6]
    assert groups[1].title == "G: 8B, 8 requests of 8000 + 1 tokens, s"


def test_what_was_measured_is_kept_when_a_later_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    def measure(*_: Any, **__: Any) -> Iterator[WorkloadRow]:
        yield make_row()
        raise RuntimeError("the second one failed")

    monkeypatch.setattr(workloads, "measure", measure)
    path, plot = tmp_path / "rows.json", tmp_path / "steps.svg"
    with pytest.raises(RuntimeError, match="the second one failed"):
        workloads.main(WorkloadTask(("D", "E"), (2,), json=str(path), plot=str(plot)))
    found = json.loads(path.read_text())
    assert [row["workload"] for row in found["rows"]] == ["D"]
    assert found["rates"] == {"bytes_per_s": 4.40e12, "operations_per_s": 700e12}
    assert plot.read_text().count("<rect x=") == 1


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ConfigError, match="unknown 'Z'; known: A, B, C, D, E, F, G, H, I, L, M, N1, N8, Q1, Q32, S, S256, X"
    ):
        WorkloadTask(("D", "Z"), (2,))
    for flags, words in (
        (["--peer", "vllm"], "--peer goes with --workload"),
        (["--workload", "D", "--peers"], "named by --peer"),
        (["--workload", "D", "--peer-python", "/no/such"], "--peer-python: no interpreter: /no/such"),
    ):
        assert main(["bench", "offline", *flags]) == 2
        assert words in capsys.readouterr().err


def test_a_peer_that_fails_is_a_line_and_kernels_are_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_gpu: None
) -> None:
    asked: list[WorkloadTask] = []

    def measure(task: WorkloadTask, *_: Any) -> Iterator[WorkloadRow | str]:
        asked.append(task)
        yield make_row(kernels=KernelTable(23, 1600.0, 3.0, (KernelRow("decode", 28.0, 25.0, 700.0),)))
        yield "vLLM, D: failed: RuntimeError: no room"

    monkeypatch.setattr(workloads, "measure", measure)
    path = tmp_path / "rows.json"
    flags = ["--workload", "D", "--peer", "vllm", "--peer-pythonpath", "/x", "--kernels", "--json", str(path)]
    assert main(["bench", "offline", *flags]) == 0
    place = PeerPlace("vllm", pythonpath="/x")
    assert asked == [WorkloadTask(("D",), (1, 2), peers=(place,), kernels=True, json=str(path))]
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
