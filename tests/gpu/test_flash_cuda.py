"""Attention by libraries on a real GPU: the real ones where they are installed, a stand-in for the way around them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_libraries import FLASH3, install
from gapless import LLM, SamplingParams
from tiny import VOCAB_SIZE, write_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
MODULES = {"flash3": "flash_attn_interface", "flashinfer": "flashinfer"}
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda", "depth": 2, "max_num_rows": 8}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("wide"), head_dim=64, max_position_embeddings=512)


def generate(model_dir: Path, **options: Any) -> tuple[list[tuple[int, ...]], str]:
    """Greedy tokens of prompts of many lengths, and which attention gave them."""
    draw = random.Random(3)
    prompts = [[draw.randrange(1, VOCAB_SIZE) for _ in range(draw.choice([20, 64, 130, 300]))] for _ in range(24)]
    with LLM(model_dir, **OPTIONS, **options) as llm:
        found = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        assert [completion.error for completion in found] == [None] * len(prompts)
        return [completion.token_ids for completion in found], llm.engine.monitor.attention()


def check_tokens(model_dir: Path, name: str) -> None:
    """Rounding may part them, but not many of them: another attention altogether would part them all."""
    expected, _ = generate(model_dir, attention="triton")
    found, shown = generate(model_dir, attention=name)
    assert shown.startswith(f"attention: {name} ")
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= len(expected) // 2


@pytest.mark.parametrize("name", MODULES)
def test_tokens_by_a_library(model_dir: Path, name: str) -> None:
    pytest.importorskip(MODULES[name])
    check_tokens(model_dir, name)


@pytest.mark.parametrize("name", MODULES)
def test_a_library_agrees_and_is_timed(model_dir: Path, name: str) -> None:
    pytest.importorskip(MODULES[name])
    _, shown = generate(model_dir)
    assert f"decode rows: {name} takes " in shown or f", {name} takes " in shown, shown


def test_tokens_by_a_stand_in(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In captured graphs and without, where it is given other lengths and tables than it was captured with."""
    install(monkeypatch, **FLASH3)
    check_tokens(model_dir, "flash3")


def test_a_slow_stand_in_is_timed_and_not_taken(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **FLASH3)
    _, shown = generate(model_dir)
    assert shown.startswith("attention: triton (decode rows: flash3 takes "), shown
    assert "chunks: flash3 takes " in shown
