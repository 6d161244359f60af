"""The simulator against a real engine on the same trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from gapless.bench.sim_check import compare_loads
from gapless.llm import LLM
from gapless.sim.arrivals import Arrival
from tiny import CPU, write_dummy

ARRIVALS = [Arrival(n * n % 7 + n / 10, 8 + 11 * n % 60, 4 + n % 9) for n in range(24)]
BY_TIME = sorted(ARRIVALS, key=lambda arrival: arrival.at_s)


def test_a_real_run_and_its_prediction(tmp_path: Path) -> None:
    """Latencies are not compared here: on a busy machine the same step takes any time."""
    model = str(write_dummy(tmp_path, hidden_size=256, intermediate_size=1024, num_hidden_layers=4))
    with LLM(model, load_format="dummy", max_num_rows=8, depth=2, num_threads=1, native=False, **CPU) as llm:
        (row,) = compare_loads(llm, BY_TIME, [0.5], rounds=1)
    assert row.measured.keys() == row.predicted.keys()
    assert row.ratio("tokens/s") == pytest.approx(1, abs=0.5)
    assert all(value > 0 for value in (*row.measured.values(), *row.predicted.values()))
