"""Triton's hooks, shared: reports compiled and loaded kernels to any number of listeners, and the launches of a block.

Triton calls one listener for compilations and chains of hooks for the rest, for all threads of the process. Imports
Triton when it is first used; without it there is nothing to report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

MICROSECOND = 1e-6


class KernelListener(Protocol):
    """Told of kernels, by whatever thread compiles or loads them."""

    def compiled(self, name: str, seconds: float, *, cached: bool) -> None:
        """A kernel was compiled, or found in the cache of compiled ones."""

    def loaded(self, name: str) -> None:
        """A kernel was loaded onto the device."""


_listeners: list[KernelListener] = []
_installed = False


def listen(listener: KernelListener) -> None:
    """Report to it from now on."""
    _listeners.append(listener)
    _install()


def forget(listener: KernelListener) -> None:
    """Report to it no more."""
    if listener in _listeners:
        _listeners.remove(listener)


@contextmanager
def around_launches(before: Callable[[Any], None], after: Callable[[Any], None]) -> Iterator[None]:
    """Call both around every launch of a kernel within the block, by any thread."""
    runtime = _knobs().runtime
    runtime.launch_enter_hook.add(before)
    runtime.launch_exit_hook.add(after)
    try:
        yield
    finally:
        runtime.launch_enter_hook.remove(before)
        runtime.launch_exit_hook.remove(after)


def _knobs() -> Any:
    from triton import knobs

    return knobs


def _install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    try:
        knobs = _knobs()
    except ImportError:
        return
    earlier = knobs.compilation.listener

    def on_compile(**told: Any) -> None:
        if earlier is not None:
            earlier(**told)
        source = told["src"]
        cached = told["cache_hit"] and not getattr(source, "compiled_elsewhere", False)
        for listener in list(_listeners):
            listener.compiled(source.name, told["times"].total * MICROSECOND, cached=cached)

    def on_load(module: Any, function: Any, name: str, *others: Any) -> None:
        for listener in list(_listeners):
            listener.loaded(name)

    knobs.compilation.listener = on_compile
    knobs.runtime.kernel_load_end_hook.add(on_load)
