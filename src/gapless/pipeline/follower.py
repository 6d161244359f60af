"""The process of any rank but the first: builds its part of the model, then runs every plan that rank 0 sends.

    main thread        reads plans, from the ring or a connection, and launches them
    collector thread   waits for each step, in order, so that a step that fails is told at once

Draws no tokens and returns none: a step ends with those of rank 0. Ends with rank 0, whose death closes the bell or
the connection.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import socket
import sys
import threading
import time
from typing import Protocol

from gapless.child import become_child
from gapless.config import EngineOptions, see_one_gpu
from gapless.core.request import IntArray
from gapless.device import pick_device
from gapless.models.source import resolve
from gapless.pipeline.executor import LocalExecutor, Ticket
from gapless.ranks.link import Link, Word
from gapless.ranks.plan_socket import PlanReceiver
from gapless.ranks.plan_words import read_plan
from gapless.ranks.ring import RingReader, RingShape
from gapless.ranks.torch_group import CollectiveFailed, TorchGroup, find_store
from gapless.runner.build import build
from gapless.runner.kits import kit_for

EXIT_FAILED = 70
SIGN_S = 0.5


def main(link_fd: int, plans_fd: int, ring_fd: int | None = None) -> None:
    """Serve until rank 0 hangs up or is gone. plans_fd: the bell of a ring, or else a connection. Never returns."""
    become_child()
    faulthandler.enable()
    link = Link(socket.socket(fileno=link_fd))
    link.send("here")
    start = link.receive()
    if start is None:
        os._exit(0)
    try:
        follow(link, start, plans_fd, ring_fd)
    except BaseException as error:
        fail(link, error)
    os._exit(0)  # threads of libraries are not waited for


def follow(link: Link, start: Word, plans_fd: int, ring_fd: int | None) -> None:
    """Build, then run plans until there are no more."""
    rank, options = start["rank"], EngineOptions.from_dict(start["options"])
    if start["gpu"] is not None:  # else it sees its own alone
        see_one_gpu(start["gpu"])
    backend = kit_for(pick_device(options.device)).collectives
    store = find_store(start["host"], start["port"], options.rank_timeout)
    group = TorchGroup(backend, store, rank, start["size"], options.rank_timeout, start["own"])
    source = resolve(start["path"] if os.path.exists(start["path"]) else options.model)
    built = build(options, source, LifeSigns(link).progress, processed=start["processed"], group=group)
    num_slots = start["num_slots"]
    executor = LocalExecutor(built.device, built.runner, built.resolved.limits, num_slots)
    link.send("ready")
    go = link.receive()
    if go is None:
        return
    FollowedSteps(executor, num_slots, link).run(plans_of(go, plans_fd, ring_fd))


class PlanSource(Protocol):
    """The end of whatever carries plans here."""

    def read(self) -> IntArray | None:
        """Wait for the next one; None when there will be no more."""


def plans_of(go: Word, plans_fd: int, ring_fd: int | None) -> PlanSource:
    if ring_fd is None:
        return PlanReceiver(socket.socket(fileno=plans_fd), go["place_words"])
    shape = RingShape(go["num_readers"], go["num_places"], go["place_words"])
    return RingReader(ring_fd, shape, go["reader"], plans_fd)


class LifeSigns:
    """Tells rank 0 now and then that loading goes on."""

    def __init__(self, link: Link) -> None:
        self._link, self._last_s = link, 0.0

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last_s > SIGN_S:
            self._last_s = now
            self._link.send("sign")


class FollowedSteps:
    """The steps in flight on this rank."""

    def __init__(self, executor: LocalExecutor, num_slots: int, link: Link) -> None:
        self._executor, self._link = executor, link
        self._free = threading.Semaphore(num_slots)
        self._tickets: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()

    def run(self, plans: PlanSource) -> None:
        """Launch each plan as it comes, until there are no more."""
        collector = threading.Thread(target=self._collect, name="gapless-collect", daemon=True)
        collector.start()
        while (words := plans.read()) is not None:
            self._free.acquire()
            self._tickets.put(self._executor.launch(read_plan(words)))
        self._tickets.put(None)
        collector.join()

    def _collect(self) -> None:
        try:
            while (ticket := self._tickets.get()) is not None:
                self._executor.collect(ticket)
                self._free.release()
        except BaseException as error:
            fail(self._link, error)


def fail(link: Link, error: BaseException) -> None:
    """Last words."""
    lost = isinstance(error, CollectiveFailed) or isinstance(error.__cause__, CollectiveFailed)
    link.send("failed", reason=str(error) or type(error).__name__, lost=lost)
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
