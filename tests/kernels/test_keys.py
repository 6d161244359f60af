"""Keys of kernels do not depend on the order in which they are made."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.jit import DependenciesFinder, JITFunction

from gapless.kernels.keys import settle_keys

FACTOR = tl.constexpr(3)


def _scaled(x):
    return x * FACTOR


def _kernel(out):
    tl.store(out, scaled(tl.load(out)))  # noqa: F821


def _globals_too_early(finder: Any, function: Any) -> None:
    """As Triton 3.6 does it: the globals of the function are taken before its key, which finds them, is made."""
    finder.used_global_vals.update(function.used_global_vals)
    finder.hasher.update(function.cache_key.encode())


def _key(monkeypatch: pytest.MonkeyPatch, *, callee_first: bool) -> str:
    callee, kernel = JITFunction(_scaled), JITFunction(_kernel)
    monkeypatch.setattr(sys.modules[__name__], "scaled", callee, raising=False)
    if callee_first:
        _ = callee.cache_key
    return str(kernel.cache_key)


def test_a_key_does_not_depend_on_what_was_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(DependenciesFinder, "_update_hash", _globals_too_early)
    assert _key(monkeypatch, callee_first=True) != _key(monkeypatch, callee_first=False)
    settle_keys()
    settle_keys()  # once is enough
    assert _key(monkeypatch, callee_first=True) == _key(monkeypatch, callee_first=False)
