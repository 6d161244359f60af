"""The benchmark of the host's cost: what the loop is given to do, and what is reported."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from gapless.bench import host
from gapless.bench.host import HostLoad, HostRow, measure
from gapless.core.plan import Plan
from gapless.core.request import IntArray
from gapless.core.scheduler import Scheduler
from gapless.errors import ConfigError
from gapless.runner.fill import fill

BATCH = 8


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "NUM_ROUNDS", 1)


def launched(load: HostLoad, monkeypatch: pytest.MonkeyPatch) -> tuple[HostRow, list[Plan]]:
    """The reported row, and the timed plans of the recorded run."""
    plans: list[Plan] = []

    def pack(plan: Plan, out: IntArray) -> int:
        plans.append(plan)
        return fill(plan, out)

    monkeypatch.setattr(HostLoad, "pack", lambda self, batch: pack)
    row = measure(BATCH, load)
    first = load.warmup_steps(BATCH)
    return row, plans[first : first + load.num_steps]


def test_a_decode_load_has_all_rows_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    row, plans = launched(HostLoad(20), monkeypatch)
    assert all(plan.num_decodes == BATCH and not plan.chunks for plan in plans)
    assert row.num_admitted == 0


def test_a_mixed_load_keeps_its_rows_full(monkeypatch: pytest.MonkeyPatch) -> None:
    row, plans = launched(HostLoad(400, mixed=True), monkeypatch)
    chunks = [chunk for plan in plans for chunk in plan.chunks]
    seats = sum(len(plan.seat_rows) for plan in plans)
    assert 10 < seats < 40  # 400 steps of 8 rows; an answer has 160 tokens in the mean
    assert row.num_admitted == pytest.approx(seats / 400, abs=0.01)
    assert 64 <= min(len(chunk.tokens) for chunk in chunks) < max(len(chunk.tokens) for chunk in chunks) <= 1024
    assert np.mean([plan.num_decodes + len(plan.chunks) for plan in plans]) > 0.95 * BATCH


@pytest.mark.parametrize("mixed", [False, True])
def test_log_probabilities_are_asked_for_with_every_sample(mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, plans = launched(HostLoad(20, mixed=mixed, logprobs=5), monkeypatch)
    assert all(plan.num_top == 5 and len(plan.score_samples) == plan.num_samples for plan in plans)


def test_phases_share_the_time() -> None:
    row = measure(BATCH, HostLoad(20, mixed=True))
    assert set(row.phase_shares) >= {"schedule", "fill", "launch", "collect", "commit"}
    assert sum(row.phase_shares.values()) == pytest.approx(1)
    assert row.host_ms_min <= row.host_ms_per_step <= row.host_ms_max


def test_chunks_are_packed_for_the_chosen_device() -> None:
    pytest.importorskip("triton")
    from gapless.runner.mixed import pack_mixed

    scheduler = Scheduler(HostLoad(20).limits(BATCH))
    scheduler.add(HostLoad(20).requests(BATCH)[0])
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.chunks
    mine, theirs = np.zeros(500, np.int32), np.zeros(500, np.int32)
    assert HostLoad(20, packing="gpu").pack(BATCH)(plan, mine) == pack_mixed(plan, theirs, BATCH)
    assert np.array_equal(mine, theirs)
    assert HostLoad(20).pack(BATCH) is fill


def options(**changes: object) -> argparse.Namespace:
    values = {"batch": [2], "steps": 20, "depth": 2, "mixed": True, "logprobs": 3, "packing": "cpu", "json": None}
    return argparse.Namespace(**{**values, **changes})


def test_the_load_stands_beside_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "host.json"
    assert host.main(options(json=str(path))) == 0
    found = json.loads(path.read_text())
    assert (found["mixed"], found["logprobs"], found["depth"], found["packing"]) == (True, 3, 2, "cpu")
    assert found["rows"][0]["phase_shares"]["commit"] > 0
    out = capsys.readouterr().out
    assert "mixed step, 3 log-probabilities a sample" in out
    assert "commit" in out


@pytest.mark.parametrize("wrong", [{"batch": [0]}, {"steps": 1}, {"depth": 0}, {"logprobs": -1}, {"logprobs": 10**6}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        host.main(options(**wrong))
