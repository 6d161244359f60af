"""Ranks 1 to N - 1 as rank 0 sees them: started, watched, handed plans, and ended together.

Owns their processes. One thread starts them and lives as long as they do, for a child dies with the thread that made
it. It watches them too: if one dies or fails, it kills the others and says which was the first.
"""

from __future__ import annotations

import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gapless.child import spawn
from gapless.core.plan import Plan
from gapless.errors import RankFailed
from gapless.ranks.link import Link, Word
from gapless.ranks.plan_words import write_plan
from gapless.ranks.ring import RingShape, RingWriter, shared_memory

COMMAND = (sys.executable, "-m", "gapless.pipeline.follower")
START_S = 180.0  # for a process to import torch, at least
GRACE_S = 0.3  # in which others may fail too, before the first cause is named
CLOSE_S = 5.0
LOST = 2  # how far from the first cause a rank is that only missed the others
Alarm = Callable[[RankFailed], None]


@dataclass(eq=False, slots=True)
class Mate:
    """One of the other ranks."""

    rank: int
    process: subprocess.Popen[bytes]
    link: Link
    bell: int
    kinds: set[str] = field(default_factory=set)  # of the words that it has said
    last_word: Word | None = None  # why it failed
    is_gone: bool = False

    def end(self) -> tuple[int, str]:
        """What became of it: how far from the first cause, and in words."""
        if self.last_word is not None:
            return (LOST if self.last_word["lost"] else 1), f"rank {self.rank} failed: {self.last_word['reason']}"
        try:
            code = self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return 0, f"rank {self.rank} closed its connection"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return 0, f"rank {self.rank} {how}"


class Team:
    """The other ranks."""

    def __init__(self, num_ranks: int, timeout_s: float, alarm: Alarm, command: Sequence[str] = COMMAND) -> None:
        """alarm: told, by a thread of its own, why the group has ended before its time."""
        self._timeout_s, self._alarm, self._command = timeout_s, alarm, command
        self._ring_fd = shared_memory()
        self._ring: RingWriter | None = None
        self._mates: list[Mate] = []
        self._failure: RankFailed | None = None
        self._failed = threading.Event()
        self._closing = threading.Event()
        self._heard = threading.Condition()
        self._last_sign_s = time.monotonic()
        self._wake_read, self._wake_write = os.pipe()
        self._wake_ends = [self._wake_read, self._wake_write]  # open
        started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(num_ranks, started), name="gapless-ranks", daemon=True)
        self._thread.start()
        if (error := started.get()) is not None:
            self.close()
            raise error

    @property
    def pids(self) -> list[int]:
        return [mate.process.pid for mate in self._mates]

    def begin(self, **values: Any) -> None:
        """Tell each rank what to load, once all of them are there. Raises RankFailed."""
        self._wait_for("here", max(self._timeout_s, START_S))
        for mate in self._mates:
            mate.link.send("start", rank=mate.rank, size=len(self._mates) + 1, **values)

    def go(self, num_places: int, place_words: int) -> None:
        """Make the ring, once all ranks are ready. Raises RankFailed."""
        self._wait_for("ready", self._timeout_s)
        shape = RingShape(len(self._mates), num_places, place_words)
        self._ring = RingWriter(self._ring_fd, shape, [mate.bell for mate in self._mates], self._timeout_s)
        for mate in self._mates:
            mate.link.send("go", num_readers=len(self._mates), num_places=num_places, place_words=place_words)

    def send(self, plan: Plan) -> None:
        """Hand a plan to every rank. Raises RankFailed."""
        assert self._ring is not None, "the ranks are not ready"
        if self._failure is not None:
            raise self._failure
        self._ring.write(lambda out: write_plan(plan, out))

    def blame(self, error: BaseException) -> RankFailed:
        """Why rank 0 met this error: the failure of another rank, or its own."""
        self._failed.wait(4 * GRACE_S)
        return self._failure or RankFailed(f"rank 0 failed: {error}")

    def close(self, *, at_once: bool = False) -> None:
        """Let the ranks end what they have, kill those that do not, and wait until all are gone.

        at_once: kill them, for they are in the middle of something that rank 0 has given up.
        """
        if at_once:
            for mate in self._mates:
                mate.process.kill()
        if not self._closing.is_set():
            self._closing.set()
            os.write(self._wake_write, b"\1")
        self._thread.join()
        while self._wake_ends:
            os.close(self._wake_ends.pop())

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self, num_ranks: int, started: queue.SimpleQueue[BaseException | None]) -> None:
        try:
            for rank in range(1, num_ranks):
                self._mates.append(self._start(rank))
        except BaseException as error:
            started.put(error)
        else:
            started.put(None)
            self._watch()
        finally:
            self._end()

    def _start(self, rank: int) -> Mate:
        ours, theirs = socket.socketpair()
        listening, bell = os.pipe()
        os.set_blocking(bell, False)
        try:
            process = spawn(self._command, (theirs.fileno(), listening, self._ring_fd))
        except OSError:
            ours.close()
            os.close(bell)
            raise
        finally:
            theirs.close()
            os.close(listening)
        return Mate(rank, process, Link(ours), bell)

    def _watch(self) -> None:
        """Until the group is closed, or one of its ranks is lost."""
        while not self._closing.is_set():
            if self._listen(None) and not self._closing.is_set():
                deadline = time.monotonic() + GRACE_S
                while (left := deadline - time.monotonic()) > 0 and not all(m.is_gone for m in self._mates):
                    self._listen(left)
                self._fail(self._first_cause())
                return

    def _first_cause(self) -> str:
        """In words: the rank that died or failed by itself, or those that others waited for in vain."""
        distance, reason = min(mate.end() for mate in self._mates if mate.is_gone)
        silent = [mate.rank for mate in self._mates if not mate.is_gone]
        return f"ranks {silent} did not answer; {reason}" if distance == LOST and silent else reason

    def _listen(self, timeout_s: float | None) -> bool:
        """Hear what the ranks say; True if any is lost."""
        there = [mate for mate in self._mates if not mate.is_gone]
        heard = [self._wake_read, *(mate.link.fileno() for mate in there)]
        readable = _readable(heard, timeout_s)
        if self._wake_read in readable:
            return False
        for mate in there:
            if mate.link.fileno() in readable:
                words, is_open = mate.link.waiting()
                self._hear(mate, words, is_open)
        return any(mate.is_gone for mate in self._mates)

    def _hear(self, mate: Mate, words: list[Word], is_open: bool) -> None:
        with self._heard:
            for word in words:
                mate.kinds.add(word["kind"])
                if word["kind"] == "failed":
                    mate.last_word = word
            mate.is_gone = not is_open or mate.last_word is not None
            self._last_sign_s = time.monotonic()
            self._heard.notify_all()

    def _fail(self, reason: str) -> None:
        for mate in self._mates:
            mate.process.kill()  # else a rank that waits for the lost one would wait for its whole time limit
        with self._heard:
            self._failure = RankFailed(f"{reason}; the group of {len(self._mates) + 1} ranks has ended")
            self._heard.notify_all()
        self._failed.set()
        self._alarm(self._failure)

    def _end(self) -> None:
        for mate in self._mates:
            os.close(mate.bell)
        deadline = time.monotonic() + CLOSE_S
        for mate in self._mates:
            try:
                mate.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                mate.process.kill()
                mate.process.wait()
            mate.link.close()
        os.close(self._ring_fd)

    def _wait_for(self, kind: str, timeout_s: float) -> None:
        """Until every rank has said this; no longer than `timeout_s` without any word."""
        with self._heard:
            self._last_sign_s = time.monotonic()
            while not all(kind in mate.kinds for mate in self._mates):
                if self._failure is not None:
                    raise self._failure
                left = self._last_sign_s + timeout_s - time.monotonic()
                if left <= 0:
                    late = [mate.rank for mate in self._mates if kind not in mate.kinds]
                    raise RankFailed(f"ranks {late} said nothing for {timeout_s:g} s while they started")
                self._heard.wait(left)


def _readable(fds: Sequence[int], timeout_s: float | None) -> set[int]:
    """Those that can be read, once there is one. Not by select(), which knows no descriptor above 1023."""
    with selectors.PollSelector() as selector:
        for fd in fds:
            selector.register(fd, selectors.EVENT_READ)
        return {key.fd for key, _ in selector.select(timeout_s)}
