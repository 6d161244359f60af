"""A fit finds the terms that made the steps, and files of steps survive a round trip."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gapless.core.limits import Limits
from gapless.errors import ConfigError
from gapless.sim.costs import Costs, MeasuredStep, StepShape, fit
from gapless.sim.step_file import StepFile, read_steps, write_steps

TRUE = Costs((4e-3, 1e-3, 2e-5, 3e-8, 5e-5, 1e-9), 0, 0.0, 0.0)
LIMITS = Limits(8, 100, 16, 512, 256)


def steps(noise: float = 0.0) -> list[MeasuredStep]:
    draw = np.random.default_rng(1)
    found = []
    for number in range(300):
        rows, length = int(draw.integers(0, 64)), int(draw.integers(1, 4000))
        tokens = int(draw.integers(1, 2048)) if number % 2 else 0
        shape = StepShape(rows, rows * length, tokens, tokens * int(draw.integers(1, 4000)))
        found.append(MeasuredStep(shape, TRUE.of(shape) * float(1 + noise * draw.standard_normal())))
    return found


def test_exact_steps_give_the_exact_terms() -> None:
    costs = fit(steps())
    np.testing.assert_allclose(costs.seconds, TRUE.seconds, rtol=1e-6)
    assert costs.error < 1e-9


def test_noise_is_reported_and_the_total_is_right() -> None:
    noisy = steps(0.1)
    costs = fit(noisy)
    assert 0.04 < costs.error < 0.1
    assert sum(costs.of(step.shape) for step in noisy) == pytest.approx(sum(step.seconds for step in noisy))


def test_no_term_is_negative() -> None:
    falling = [MeasuredStep(StepShape(n, 0, 0, 0), 1.0 - n / 100) for n in range(1, 50)]
    assert min(fit(falling).seconds) >= 0


def test_too_few_steps() -> None:
    with pytest.raises(ConfigError, match="3 measured steps are too few"):
        fit(steps()[:3])


def test_round_trip(tmp_path: Path) -> None:
    path = str(tmp_path / "steps.jsonl")
    given = StepFile(LIMITS, 2, "a model", tuple(steps()[:5]))
    write_steps(path, given)
    assert read_steps(path) == given


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1 has no limits"),
        ("{}\n", "line 1 has no limits"),
        ("x\n", "line 1: not a JSON object"),
        ('{"limits": {"num_rows": 0}}\n', "line 1: num_rows must be an integer of at least 1, not 0"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "steps"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_steps(str(path))


def test_a_wrong_step(tmp_path: Path) -> None:
    path = str(tmp_path / "steps")
    write_steps(path, StepFile(LIMITS, 2, "a model", (MeasuredStep(StepShape(1, 1, 0, 0), -1.0),)))
    with pytest.raises(ConfigError, match=r"line 2: seconds must be a number above 0, not -1.0"):
        read_steps(path)
