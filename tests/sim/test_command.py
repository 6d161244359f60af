"""`gapless sim` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gapless.cli import main
from gapless.core.limits import Limits
from gapless.sim.costs import Costs, MeasuredStep, StepShape
from gapless.sim.step_file import SHIPPED, StepFile, write_steps

TRUE = Costs((4e-3, 1e-3, 2e-5, 3e-8, 5e-5, 1e-9), 0, 0.0, 0.0)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    shapes = [StepShape(n % 9, 100 * (n % 9), 0 if n % 3 else n, n * n) for n in range(1, 60)]
    steps = tuple(MeasuredStep(shape, TRUE.of(shape)) for shape in shapes)
    write_steps(str(tmp_path / "steps"), StepFile(Limits(8, 100, 16, 512, 256), 2, "a model", steps))
    rows = [
        {"arrival_s": n / 10, "prompt_tokens": 30, "output_tokens": 5, "hashes": [1], "hash_tokens": 16}
        for n in range(20)
    ]
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, rows)))
    return ["sim", str(tmp_path / "trace"), "--costs", str(tmp_path / "steps")]


def test_table_page_and_figures(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, figures = tmp_path / "r.html", tmp_path / "r.json"
    assert main([*files, "--replicas", "2", "--price", "3", "--html", str(html), "--json", str(figures)]) == 0
    out = capsys.readouterr().out
    assert "20 in" in out
    assert "2 replicas of 1 GPU" in out
    assert "bottleneck  none yet" in out
    found = json.loads(figures.read_text())
    assert found["num_requests"] == 20
    assert found["cached_share"] == pytest.approx(16 * 18 / (20 * 30)), "each replica computes the prefix once"
    page = html.read_text()
    svg = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    assert len(svg.findall("{*}polyline")) == 4


def test_rate(files: list[str], tmp_path: Path) -> None:
    for rate in (1, 2):
        assert main([*files, "--rate", str(rate), "--json", str(tmp_path / f"{rate}")]) == 0
    slow, fast = (json.loads((tmp_path / f"{rate}").read_text())["seconds"] for rate in (1, 2))
    assert slow > 1.8 * fast


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--replicas", "0"], "--replicas must be at least 1"),
        (["--rate", "0"], "--rate must be a number above 0"),
        (["--price", "-1"], "--price must be a number of at least 0"),
        (["--json", "/no/such/folder/x"], "cannot be written"),
    ],
)
def test_wrong_flags(files: list[str], flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files, *flags]) != 0
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_shipped_step_times_are_the_default(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for name in SHIPPED:
        assert main([*files[:2], "--costs", name]) == 0
        assert "on an H200" in capsys.readouterr().out
    assert main(files[:2]) == 0
    assert "8B (Llama 3 shape) on an H200" in capsys.readouterr().out


def test_unknown_step_times(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files[:2], "--costs", "h100"]) == 2
    assert "--costs h100: no such file; shipped are h200-8b, h200-0.6b" in capsys.readouterr().err
