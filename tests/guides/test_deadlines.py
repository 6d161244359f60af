"""Deadlines: called in the order of their times, not for what is done, by one thread that ends."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

from gapless.guides.deadlines import Deadlines

PATIENCE_S = 20.0


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gapless-deadlines"]


def wait_for_the_end() -> None:
    end_s = time.monotonic() + PATIENCE_S
    while threads() and time.monotonic() < end_s:
        time.sleep(0.002)
    assert not threads()


def test_calls_come_in_the_order_of_their_times() -> None:
    deadlines, called, last = Deadlines(), list[int](), threading.Event()
    wait_for_the_end()
    futures: list[Future[Any]] = [Future() for _ in range(5)]
    for number in (3, 1, 4, 0, 2):  # a later one may come first
        deadlines.add(0.05 * number, futures[number], partial(called.append, number))
    futures[2].set_result(None)
    deadlines.add(0.3, Future(), last.set)
    assert len(threads()) == 1
    assert last.wait(PATIENCE_S)
    assert called == [0, 1, 3, 4]
    wait_for_the_end()


def test_the_thread_ends_when_all_is_done_and_begins_again() -> None:
    deadlines, called = Deadlines(), threading.Event()
    for _ in range(2):
        done, other = Future[Any](), Future[Any]()
        deadlines.add(600, done, called.set)
        deadlines.add(500, other, called.set)
        done.set_result(None)
        deadlines.close()
        assert len(threads()) == 1  # something is waited for still
        other.set_result(None)
        deadlines.close()
        wait_for_the_end()
    assert not called.is_set()
