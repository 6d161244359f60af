"""Load times: both loaders run in processes of their own, and the line has their figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from gapless.bench import load_times


def test_a_line_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny model, and figures that are known."""
    monkeypatch.setattr(load_times, "SIZES", load_times.SIZES | {"vocab_size": 320, "num_hidden_layers": 2})
    figures = {"gapless": (2.0, 0.5, 0.75, 3), "transformers": (1.0, 1.0, 0.0, 6)}

    def measured(name: str, warm: Path, folder: Path) -> load_times.LoadFigures:
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        wall_s, cpu_s, rest_s, times = figures[name]
        return load_times.LoadFigures(wall_s, cpu_s, rest_s, times * size)

    monkeypatch.setattr(load_times, "measured", measured)
    cells = load_times.row("llama", "LlamaForCausalLM", num_runs=1).strip("| ").split(" | ")
    assert len(cells) == len(load_times.HEAD)
    expected = ["2.00 s", "0.500 s", "1.00 s", "1.000 s", "2.00", "0.75 s", "3.00", "6.00"]
    assert [cells[0], *cells[2:]] == ["LlamaForCausalLM", *expected]


@pytest.mark.slow
def test_both_loaders_are_measured(tmp_path: Path) -> None:
    warm, folder = tmp_path / "warm", tmp_path / "model"
    for path in (warm, folder):
        load_times.save(path, "llama", "LlamaForCausalLM", vocab_size=320, num_hidden_layers=2)
    for name in load_times.LOADERS:
        found = load_times.measured(name, warm, folder)
        assert found.wall_s > 0 < found.cpu_s
