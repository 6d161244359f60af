"""What a mistake is: a patch of one function while it lasts, or an executor of its own, and where it is played."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from gapless.pipeline.checked import MakeExecutor
from gapless.pipeline.executor import LocalExecutor

TOY, GRAPHS, NATIVE, WINDOWED = "toy", "graphs", "native", "windowed"  # the stages of stages.py

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Fault:
    """One mistake."""

    name: str
    apply: Callable[[], AbstractContextManager[Any]] = nullcontext
    make: Callable[[], MakeExecutor] = lambda: LocalExecutor
    stage: str = TOY


def wrapping(owner: Any, name: str, wrap: Wrap) -> Any:
    """A patch of one function by another that gets the original."""
    return lambda: patch.object(owner, name, wrap(getattr(owner, name)))


class Table(list[Fault]):
    """Mistakes, made by decorating a function that wraps the original."""

    def __init__(self, stage: str = TOY) -> None:
        self._stage = stage

    def __call__(self, name: str, owner: Any, attribute: str) -> Callable[[Wrap], Fault]:
        def register(wrap: Wrap) -> Fault:
            self.append(Fault(name, wrapping(owner, attribute, wrap), stage=self._stage))
            return self[-1]

        return register
