"""A Triton whose Gluon is not the one that a kernel was written for."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

GLUON = "triton.experimental.gluon"


class Renamed(ModuleType):
    """A module that lacks every name."""

    def __getattr__(self, name: str) -> None:
        raise AttributeError(name)


OTHERS = [None, Renamed("language")]  # a module is missing, or its names are


def put_in_place(monkeypatch: pytest.MonkeyPatch, other: ModuleType | None, of: str, kernels: str) -> None:
    """Have it stand for the module `of` of Gluon when the module `kernels` of ours is loaded, which it is anew."""
    monkeypatch.delitem(sys.modules, f"gapless.kernels.{kernels}", raising=False)
    monkeypatch.delattr(f"gapless.kernels.{kernels}", raising=False)
    monkeypatch.setitem(sys.modules, f"{GLUON}.{of}", other)
