"""Calls functions when their time has come, unless what they wait for has come before: one thread for all of them.

A thread for each would take longer to start than most grammars take to compile.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Deadlines:
    """The thread starts with the first deadline, and ends when nothing is waited for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Future[Any], Callable[[], None]]] = []  # a heap, by time
        self._numbers = itertools.count()  # so that two of the same time are not compared any further
        self._has_thread = False

    def add(self, seconds: float, future: Future[Any], call: Callable[[], None]) -> None:
        """Call on the thread after so many seconds, unless the future is done by then."""
        entry = (time.monotonic() + seconds, next(self._numbers), future, call)
        with self._changed:
            self._forget()
            heapq.heappush(self._waiting, entry)
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._work, name="gapless-deadlines", daemon=True).start()
            elif self._waiting[0] is entry:  # it comes before the one that the thread sleeps for
                self._changed.notify()

    def close(self) -> None:
        """Let the thread end as soon as nothing is waited for."""
        with self._changed:
            self._waiting = [entry for entry in self._waiting if not entry[2].done()]
            heapq.heapify(self._waiting)
            self._changed.notify()

    def _forget(self) -> None:
        """Drop the next ones that nobody waits for any more."""
        while self._waiting and self._waiting[0][2].done():
            heapq.heappop(self._waiting)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._forget()
                if not self._waiting:
                    self._has_thread = False
                    return
                left_s = self._waiting[0][0] - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                    continue
                _, _, _, call = heapq.heappop(self._waiting)
            call()  # outside the lock, because it takes others
