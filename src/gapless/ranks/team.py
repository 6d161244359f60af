"""Ranks 1 to N - 1 as rank 0 sees them: started, watched, handed plans, and ended together.

Owns their squads. One thread starts them and lives as long as they do, for a child dies with the thread that made it.
It watches them too: if one dies or fails, it kills the others and says which was the first.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gapless.core.plan import Plan
from gapless.core.request import IntArray
from gapless.errors import RankFailed
from gapless.ranks.link import Word, readable
from gapless.ranks.mate import GRACE_S, LOST, Mate, Squad
from gapless.ranks.plan_words import write_plan

START_S = 180.0  # for a process to import torch, at least
CLOSE_S = 5.0
Alarm = Callable[[RankFailed], None]


class Team:
    """The other ranks."""

    def __init__(self, squads: Sequence[Squad], timeout_s: float, alarm: Alarm) -> None:
        """alarm: told, by a thread of its own, why the group has ended before its time. Raises what squads do."""
        self._squads, self._timeout_s, self._alarm = squads, timeout_s, alarm
        self._words: IntArray | None = None  # of the plan that is sent
        self._mates: list[Mate] = []
        self._failure: RankFailed | None = None
        self._failed = threading.Event()
        self._closing = threading.Event()
        self._heard = threading.Condition()
        self._last_sign_s = time.monotonic()
        self._wake_read, self._wake_write = os.pipe()
        self._wake_ends = [self._wake_read, self._wake_write]  # open
        started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(started,), name="gapless-ranks", daemon=True)
        self._thread.start()
        try:
            error = started.get()  # takes a while where ranks call from other nodes
        except BaseException:
            self.close(at_once=True)
            raise
        if error is not None:
            self.close()
            raise error

    def begin(self, **values: Any) -> None:
        """Tell each rank what to load, once all of them are there. Raises RankFailed."""
        self._wait_for("here", max(self._timeout_s, START_S))
        for mate in self._mates:
            mate.link.send("start", rank=mate.rank, size=len(self._mates) + 1, **mate.values, **values)

    def go(self, num_places: int, place_words: int) -> None:
        """Make room for so many plans under way, once all ranks are ready. Raises RankFailed."""
        self._wait_for("ready", self._timeout_s)
        self._words = np.empty(place_words, np.int32)
        for squad in self._squads:
            squad.open(num_places, place_words)

    def send(self, plan: Plan) -> None:
        """Hand a plan to every rank. Raises RankFailed."""
        assert self._words is not None, "the ranks are not ready"
        if self._failure is not None:
            raise self._failure
        words = self._words[: write_plan(plan, self._words)]
        for squad in self._squads:
            squad.write(words)

    def blame(self, error: BaseException) -> RankFailed:
        """Why rank 0 met this error: the failure of another rank, or its own."""
        self._failed.wait(4 * GRACE_S)
        return self._failure or RankFailed(f"rank 0 failed: {error}")

    def close(self, *, at_once: bool = False) -> None:
        """Let the ranks end what they have, kill those that do not, and wait until all are gone.

        at_once: kill them, for they are in the middle of something that rank 0 has given up.
        """
        if at_once:
            self._kill()
        if not self._closing.is_set():
            self._closing.set()
            os.write(self._wake_write, b"\1")
        self._thread.join()
        while self._wake_ends:
            os.close(self._wake_ends.pop())

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self, started: queue.SimpleQueue[BaseException | None]) -> None:
        try:
            for squad in self._squads:
                for mate in squad.start():
                    self._mates.append(mate)
        except BaseException as error:
            self._kill()
            started.put(error)
        else:
            started.put(None)
            self._watch()
        finally:
            self._end()

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
        found = readable(heard, timeout_s)
        if self._wake_read in found:
            return False
        for mate in there:
            if mate.link.fileno() in found:
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
        self._kill()  # else a rank that waits for the lost one would wait for its whole time limit
        with self._heard:
            self._failure = RankFailed(f"{reason}; the group of {len(self._mates) + 1} ranks has ended")
            self._heard.notify_all()
        self._failed.set()
        self._alarm(self._failure)

    def _kill(self) -> None:
        for mate in self._mates:
            mate.life.kill()

    def _end(self) -> None:
        for squad in self._squads:
            squad.hang_up()
        deadline = time.monotonic() + CLOSE_S
        for mate in self._mates:
            if mate.life.wait(max(0.0, deadline - time.monotonic())) is None:
                mate.life.kill()
                mate.life.wait(CLOSE_S)
            mate.link.close()
        for squad in self._squads:
            squad.close()

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
