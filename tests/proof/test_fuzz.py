"""A short share of the fuzz, always the same; `make fuzz` runs the long one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest

from gapless.core.block_pool import BlockPool
from gapless.proof import fuzz
from gapless.proof.report import ProofFailure
from gapless.proof.tiny import FAMILIES

NUM_WORKLOADS = 16


def quiet(text: str) -> None:
    pass


def test_a_share_of_the_fuzz() -> None:
    said: list[str] = []
    tally, number, failures = fuzz.run(11, most_workloads=NUM_WORKLOADS, say=said.append)
    assert (failures, number) == ([], NUM_WORKLOADS), said
    assert tally.passed
    assert tally.num_schedules == NUM_WORKLOADS * fuzz.DEPTHS_A_WORKLOAD
    assert tally.num_compared > 500
    assert tally.num_scores > 500
    events = (tally.num_preemptions, tally.num_aborted, tally.num_failed, tally.num_stopped, tally.num_overrun)
    assert all(count > 0 for count in (*events, tally.num_cached)), "the share must have a bit of everything"


def test_a_workload_is_its_seed() -> None:
    assert fuzz.workload(3, 7) == fuzz.workload(3, 7)
    assert fuzz.workload(3, 7) != fuzz.workload(3, 8)
    assert {fuzz.workload(0, number)[0].split("/")[1] for number in range(150)} == set(FAMILIES)


def test_a_failure_is_made_small_and_saved(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    original = BlockPool.allocate

    def allocate(self: BlockPool) -> int | None:
        block = original(self)
        if block is not None and block % 3 == 1:
            self._free.insert(0, block)
        return block

    with patch.object(BlockPool, "allocate", allocate), patch.object(fuzz, "MOST_FAILURES", 1):
        assert fuzz.main(["--target", "schedules", "--seconds", "30", "--seed", "5", "--save", str(tmp_path)]) == 1
        (path,) = tmp_path.glob("fuzz-5-*.json")
        failure = ProofFailure.load(path)
    assert len(failure.schedule.asks) == 1
    assert failure.model.startswith("tiny/")
    out = capsys.readouterr().out
    assert "seed        5" in out
    assert "1 failed" in out
    assert f"gapless check --replay {path}" in out


def test_a_folder_that_is_not_there_is_refused_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        fuzz.main(["--save", "/no/such/folder"])
    assert "no such folder" in capsys.readouterr().err


def test_the_time_is_shared_by_the_targets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[float, int]] = []

    def target(seconds: float, seed: int, save: Path) -> Counter[str]:
        asked.append((seconds, seed))
        return Counter({"ran": 3, "failed": len(asked) - 1})

    monkeypatch.setattr(fuzz, "TARGETS", {"a": target, "b": target})
    assert fuzz.main(["--seconds", "10", "--seed", "4"]) == 1
    assert asked == [(5.0, 4), (5.0, 4)]
    assert "b: 3 ran, 1 failed" in capsys.readouterr().out
    asked.clear()
    assert fuzz.main(["--target", "a", "--seconds", "10", "--seed", "4"]) == 0
    assert asked == [(10.0, 4)]
