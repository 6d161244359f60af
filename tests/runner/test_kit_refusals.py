"""A model that the backend cannot run is refused before its weights are read; what only the native step lacks, torch
runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gapless.config import EngineOptions
from gapless.errors import UnsupportedModel
from gapless.models.layers import PlainLayers
from gapless.models.loader import load_config
from gapless.models.source import ModelSource
from gapless.models.source import resolve as find
from gapless.models.spec import ExpertSpec, MlpSpec
from gapless.runner import build, resolve


def change_layers(monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
    """Every model has such layers."""

    def load(source: ModelSource) -> Any:
        config = load_config(source)
        return replace(config, layers=tuple(replace(layer, **parts) for layer in config.layers))

    monkeypatch.setattr(resolve, "load_config", load)


def options(directory: Path) -> EngineOptions:
    return EngineOptions(model=str(directory), device="cpu", load_format="dummy", dtype="float32")


@pytest.mark.parametrize("act", [build.build, resolve.resolve])
def test_a_model_is_refused_before_its_weights_are_read(
    dummy_dir: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[EngineOptions, ModelSource], Any]
) -> None:
    monkeypatch.setattr(PlainLayers, "why_not", staticmethod(lambda config: "its layers have no experts"))
    monkeypatch.setattr("gapless.models.loader.open_weights", None)
    with pytest.raises(UnsupportedModel, match=r"^LlamaForCausalLM cannot run on cpu: its layers have no experts$"):
        act(options(dummy_dir), find(dummy_dir))


def test_what_the_native_step_lacks_runs_in_torch(dummy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.runner.native_model.NATIVE", frozenset())
    change_layers(monkeypatch, mlp=MlpSpec(64, kind="experts", experts=ExpertSpec(4, 2)))
    found = resolve.resolve(options(dummy_dir), find(dummy_dir))
    assert (found.native, found.slow_reason) == (False, "experts")
