"""What all tests share: one thread for torch, hypothesis profiles, and tiny models on disk."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

import pytest
import torch
from hypothesis import HealthCheck, settings

from gapless import LLM
from tiny import CPU, write_dummy, write_tiny

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; processes that tests start inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

_COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=60, derandomize=True, **_COMMON)
settings.register_profile("search", max_examples=2000, **_COMMON)  # HYPOTHESIS_PROFILE=search: looks for more
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def dummy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds only a config.json, for load_format="dummy"."""
    return write_dummy(tmp_path_factory.mktemp("dummy"))


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole tiny model: config, weights in which every earlier token counts, tokenizer and chat template."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make_llm(tiny_dir: Path) -> Iterator[Callable[..., LLM]]:
    """Builds engines on the tiny model and closes them at the end of the test."""
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        made.append(LLM(tiny_dir, **CPU | {"depth": 2, "num_blocks": 64, "check": True} | options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(scope="session")
def tiny_llm(tiny_dir: Path) -> Iterator[LLM]:
    """One engine on the tiny model for all tests that leave it as they found it."""
    with LLM(tiny_dir, **CPU, depth=2, num_blocks=256, check=True) as llm:
        yield llm
