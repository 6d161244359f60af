"""The ring: order, places that are not overwritten, bells, and time limits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from gapless.core.request import IntArray
from gapless.errors import RankFailed
from gapless.ranks.ring import RingReader, RingShape, RingWriter, shared_memory

SHAPE = RingShape(num_readers=2, num_places=3, place_words=8)


class Ends:
    """A writer and two readers in one process, each with its own mapping."""

    def __init__(self, timeout_s: float = 0.05) -> None:
        pipes = [os.pipe() for _ in range(2)]
        self.bells = [bell for _, bell in pipes]
        memory = shared_memory()
        self.writer = RingWriter(memory, SHAPE, (1, 2), self.bells, timeout_s)
        self.readers = [RingReader(memory, SHAPE, number, pipe[0]) for number, pipe in enumerate(pipes)]
        self.fds = [memory, *(pipe[0] for pipe in pipes)]

    def write(self, *words: int) -> None:
        self.writer.write(np.array(words, np.int32))


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends()
    with ExitStack() as stack:
        for fd in found.fds:
            stack.callback(os.close, fd)
        yield found


def test_every_reader_gets_every_plan_in_order(ends: Ends) -> None:
    for turn in range(10):
        ends.write(turn)
        ends.write(turn, turn + 1)
        for reader in ends.readers:
            assert [word.tolist() for word in (reader.read(), reader.read()) if word is not None] == [
                [turn],
                [turn, turn + 1],
            ]


def test_a_place_is_not_overwritten_before_everybody_has_read_it(ends: Ends) -> None:
    for number in range(3):
        ends.write(number)
    for _ in range(3):
        ends.readers[0].read()
    with pytest.raises(RankFailed, match=r"^ranks \[2\] did not take a plan within 0\.05 s$"):
        ends.write(3)
    first = ends.readers[1].read()
    assert first is not None
    assert first.tolist() == [0]
    ends.write(3)
    assert [np.asarray(ends.readers[1].read()).tolist() for _ in range(3)] == [[1], [2], [3]]


def test_what_was_read_stays_when_the_place_is_used_again(ends: Ends) -> None:
    ends.write(7)
    kept = [reader.read() for reader in ends.readers]
    for _ in range(3):
        ends.write(8)
        for reader in ends.readers:
            reader.read()
    assert [word.tolist() for word in kept if word is not None] == [[7], [7]]


def test_a_reader_sleeps_until_its_bell(ends: Ends) -> None:
    found: list[IntArray | None] = []
    thread = threading.Thread(target=lambda: found.append(ends.readers[0].read()))
    thread.start()
    time.sleep(0.02)
    assert not found
    ends.write(5)
    thread.join(5)
    assert found[0] is not None


def test_a_closed_bell_is_the_end_behind_what_was_written(ends: Ends) -> None:
    ends.write(1)
    for bell in ends.bells:
        os.close(bell)
    for reader in ends.readers:
        assert reader.read() is not None
        assert reader.read() is None
    ends.write(2)  # nobody hears it, and nobody is hurt
