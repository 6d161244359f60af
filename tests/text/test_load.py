"""`load_tokenizer` finds the tokenizer of a GGUF file and of a Hugging Face directory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer as Backend

from gapless.text import load_tokenizer


def source(path: Path, kind: str) -> Any:
    return SimpleNamespace(name="model", path=path, kind=kind)


def test_gguf(smollm2_path: Path) -> None:
    assert load_tokenizer(source(smollm2_path, "gguf")).eos_token == "<|im_end|>"


def test_directory(tmp_path: Path, backend: Backend) -> None:
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(source(tmp_path, "hf")).vocab_size == backend.get_vocab_size()
