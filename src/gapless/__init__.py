"""Gapless: an LLM inference engine in which the GPU never waits for the CPU.

Names are loaded on first use, so that `import gapless` and `gapless --help` do not wait for torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Threads of a product that wait for the next one give their core back after some microseconds. By default they keep
# it for milliseconds, and a neighbour on the machine makes every step several times slower. Read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.9.0"

if TYPE_CHECKING:
    from gapless.async_llm import AsyncLLM
    from gapless.client import Completion, Delta
    from gapless.core.params import SamplingParams
    from gapless.core.processor import LogitsProcessor, RowFacts
    from gapless.errors import GaplessError
    from gapless.llm import LLM

_HOME = {
    "LLM": "gapless.llm",
    "AsyncLLM": "gapless.async_llm",
    "Completion": "gapless.client",
    "Delta": "gapless.client",
    "SamplingParams": "gapless.core.params",
    "LogitsProcessor": "gapless.core.processor",
    "RowFacts": "gapless.core.processor",
    "GaplessError": "gapless.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "Delta",
    "GaplessError",
    "LogitsProcessor",
    "RowFacts",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gapless' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
