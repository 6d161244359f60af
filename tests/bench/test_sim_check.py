"""The simulator against a real engine on the same trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gapless.bench import sim_check
from gapless.bench.sim_check import compare_loads, summary
from gapless.llm import LLM
from gapless.sim.arrivals import Arrival
from gapless.sim.replica import Served
from tiny import CPU, write_dummy

ARRIVALS = [Arrival(n * n % 7 + n / 10, 8 + 11 * n % 60, 4 + n % 9) for n in range(16)]
BY_TIME = sorted(ARRIVALS, key=lambda arrival: arrival.at_s)


def test_a_real_run_and_its_prediction(tmp_path: Path) -> None:
    """Latencies are not compared here: on a busy machine the same step takes any time."""
    model = str(write_dummy(tmp_path))
    with LLM(model, load_format="dummy", max_num_rows=8, depth=2, num_threads=1, **CPU) as llm:
        row, again = compare_loads(llm, BY_TIME, [0.3, 0.5], rounds=2)
    assert row.measured.keys() == row.predicted.keys()
    assert 0.2 < row.ratio("tokens/s") < 5
    assert len(row.rounds) == 2
    assert again.predicted["tokens/s"] > row.predicted["tokens/s"]
    assert len(row.lines()) == 1 + len(row.measured)
    assert all(value > 0 for value in (*row.measured.values(), *row.predicted.values()))


def test_no_play_finds_the_prompts_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of a trace make prompts of one play begin alike, and those of two plays differ."""
    found: list[float] = []
    monkeypatch.setattr(sim_check, "summary", lambda served: found.append(_hits(served)) or summary(served))
    arrivals = [Arrival(n / 10, 40, 3, (7, 8), 16) for n in range(6)]
    with LLM(str(write_dummy(tmp_path)), load_format="dummy", max_num_rows=8, depth=2, num_threads=1, **CPU) as llm:
        compare_loads(llm, arrivals, [0.1, 0.2], rounds=2)
    assert len(found) == 6
    assert {round(hits, 3) for hits in found} == {round(5 * 32 / 240, 3)}, (
        "the first request of each play finds nothing"
    )


def _hits(served: Sequence[Served]) -> float:
    return sum(each.num_cached for each in served) / sum(each.arrival.num_prompt for each in served)
