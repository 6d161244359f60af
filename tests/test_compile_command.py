"""`gapless compile`: fills a cache, with random weights; and refuses, clearly, where there is no GPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gapless.cli import main
from gapless.commands import compile as command
from gapless.config import EngineOptions
from gapless.errors import ConfigError

pytest.importorskip("triton")


class BuiltEngine:
    """Stands for an engine on a GPU: leaves a file in the cache, as a compiler would."""

    made: list[BuiltEngine]

    def __init__(self, options: EngineOptions, source: Any, progress: Any) -> None:
        self.options, self.is_closed = options, False
        folder = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel"
        folder.mkdir()
        (folder / "product.cubin").write_bytes(bytes(3 * 2**20))
        progress(1, 1)
        self.monitor = SimpleNamespace(
            kernels=lambda: {"compiled": 12, "loaded": 12}, capture_cost=lambda: "8 of 8 graphs"
        )
        self.made.append(self)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[BuiltEngine]:
    monkeypatch.setenv("TRITON_CACHE_DIR", "unset")  # restored at the end
    monkeypatch.setattr(BuiltEngine, "made", [], raising=False)
    monkeypatch.setattr(command, "Engine", BuiltEngine)
    monkeypatch.setattr(command, "resolve", lambda options, source: SimpleNamespace(device_name="cuda"))
    return BuiltEngine.made


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str], dummy_dir: Path, tmp_path: Path) -> None:
    assert main(["compile", "--model", str(dummy_dir), "--cache", str(tmp_path / "cache")]) == 2
    assert capsys.readouterr().err.startswith("gapless: compile needs the NVIDIA GPU that will run the kernels")
    assert not (tmp_path / "cache").exists()


def test_it_builds_the_engine_from_the_config_alone(
    gpu: list[BuiltEngine], capsys: pytest.CaptureFixture[str], dummy_dir: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "some" / "cache"
    assert main(["compile", "--model", str(dummy_dir), "--cache", str(cache), "--max-num-rows", "32"]) == 0
    (engine,) = gpu
    assert (engine.options.load_format, engine.options.max_num_rows, engine.is_closed) == ("dummy", 32, True)
    out = capsys.readouterr().out
    assert "12 kernels compiled, 0 were in the cache" in out
    assert f"cache: {cache}, 3.0 MiB" in out


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        command.cache_folder(str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(command.os, "access", lambda *args: False)
    with pytest.raises(ConfigError, match="cannot be written"):
        command.cache_folder(str(tmp_path))


def test_without_a_folder_it_is_tritons_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert command.cache_folder(None) == tmp_path
