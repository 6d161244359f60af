"""Keeps existing objects out of garbage collections during work.

A full collection visits every object, and torch, Triton and a model have a few hundred thousand. That takes about a
tenth of a second, in which every thread stands still, and soon the GPU too. None of them is garbage during work.
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
    """For a process of our own: keep long-lived objects out of collections, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD, 20, 20)


@contextmanager
def heap_frozen() -> Iterator[None]:
    """In a user's program: existing objects stay out of collections until every thread has left this block.

    Not for generators: one that is never finished, in a cycle of references, would stay out itself. New objects are
    collected as usual. If the program froze objects itself, nothing changes.
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


@contextmanager
def collections_paused() -> Iterator[None]:
    """Collect now, and then no more until the end of the block."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
