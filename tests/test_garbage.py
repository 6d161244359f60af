"""Garbage collection keeps out of the way while work goes on, and nothing stays left out of it afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from gapless import LLM, SamplingParams
from gapless.garbage import collections_paused, heap_frozen
from tiny import CPU


class Ring:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.fixture
def by_hand() -> Iterator[None]:
    """No collection but those that the test asks for."""
    gc.disable()
    yield
    gc.enable()


def test_what_exists_is_left_out_and_comes_back(by_hand: None) -> None:
    before = weakref.ref(Ring())
    with heap_frozen():
        new = weakref.ref(Ring())
        gc.collect()
        assert before() is not None
        assert new() is None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None


def test_what_is_made_meanwhile_is_collected_whoever_comes_in(by_hand: None) -> None:
    with heap_frozen():
        new = weakref.ref(Ring())
        with heap_frozen():
            gc.collect()
            assert new() is None
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_the_last_thread_to_leave_gives_back() -> None:
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with heap_frozen():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=stay)
    with heap_frozen():
        thread.start()
        inside.wait(60)
    assert gc.get_freeze_count() > 1000
    leave.set()
    thread.join(60)
    assert gc.get_freeze_count() == 0


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with heap_frozen():
        assert gc.get_freeze_count() <= count
    assert count - 100 <= gc.get_freeze_count() <= count


def test_a_process_of_ours_collects_rarely() -> None:
    code = "import gc; from gapless.garbage import collect_rarely; collect_rarely(); "
    code += "print(gc.get_freeze_count() > 1000, gc.get_threshold())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[0] == "True (50000, 20, 20)"


def test_generating_leaves_out_what_exists(dummy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    with LLM(dummy_dir, load_format="dummy", **CPU) as llm:
        submit = llm.engine.submit
        monkeypatch.setattr(llm.engine, "submit", lambda *given: (counts.append(gc.get_freeze_count()), submit(*given)))
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(counts) == 2
        assert min(counts) > 1000
        assert gc.get_freeze_count() == 0


def test_collections_pause_after_one_and_go_on() -> None:
    before = weakref.ref(Ring())
    with collections_paused():
        assert before() is None
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.usefixtures("by_hand")
def test_a_pause_leaves_collections_off_where_they_were() -> None:
    with pytest.raises(ValueError, match="within"), collections_paused():
        raise ValueError("within")
    assert not gc.isenabled()
