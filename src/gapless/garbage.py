"""Keeps garbage collection out of the way of work.

A full collection looks at all there is, and torch, Triton and a model are a few hundred thousand objects: some tenth of
a second in which every thread stands still, and soon the GPU too. None of them is garbage while work goes on.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLD = 50_000  # new objects between two collections in a process of ours; Python's own is 700 to 2000

_lock = threading.RLock()  # a finalizer may come in on the thread that holds it
_num_inside = 0
_is_ours = False  # what is frozen now: by us, or by the program we are part of


def collect_rarely() -> None:
    """For a process of our own: leave what lives for ever out of collections, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD, 20, 20)


@contextmanager
def heap_frozen() -> Iterator[None]:
    """In someone's program: what exists now is left out of collections until this ends, in all threads that are in it.

    Not for generators: one that is never finished, in a cycle of references, would be left out itself. What is made
    meanwhile is collected as ever. A program that froze objects itself is left as it is.
    """
    global _num_inside, _is_ours
    with _lock:
        if _num_inside == 0:
            _is_ours = gc.get_freeze_count() == 0
            if _is_ours:
                gc.freeze()
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0 and _is_ours:
                gc.unfreeze()
