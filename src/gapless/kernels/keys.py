"""Keys of kernels in Triton's cache that do not depend on what was compiled before.

Triton 3.6 puts the globals of called functions into a kernel's key, but only of functions whose own key is known by
then. With threads that take keys in any order, the next process would look for some kernels under different keys and
compile them again, as would processes that compile one kernel each.
"""

from __future__ import annotations

from typing import Any

from triton.runtime.jit import DependenciesFinder


def settle_keys() -> None:
    """From now on, a function's key is made before the keys of those that call it."""
    update = DependenciesFinder._update_hash
    if getattr(update, "settles", False):
        return

    def settled(finder: Any, function: Any) -> None:
        _ = function.cache_key
        update(finder, function)

    settled.settles = True  # type: ignore[attr-defined]
    DependenciesFinder._update_hash = settled
