"""Each cause of idle time on a timeline made by hand, in which it is the only one, and the sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import NAN, NO_COLLECTIONS, make_marks, make_steps

from gapless.trace.causes import CAUSES, HOST_LATE, attribute
from gapless.trace.columns import (
    ADMIT,
    CAPTURED,
    COLLECT,
    COMMIT,
    DELIVER,
    DRY_DONE,
    DRY_GRAMMAR,
    DRY_MEMORY,
    DRY_ROWS,
    EAGER,
    FILL,
    IDLE,
    LAUNCH,
    MASKS,
    PHASES,
    PREEMPTED,
    SCHEDULE,
    Collections,
    Marks,
    Steps,
)

# one step from 0 to 10, idle until 20, one step from 20 to 30
STEPS = make_steps([(0, 10), (20, 30)], queued=[0, 20])


def causes(steps: Steps, marks: Marks, collections: Collections = NO_COLLECTIONS, step: int = 1) -> dict[str, float]:
    """The seconds by cause before one step."""
    found = attribute(steps, marks, collections, since=0.0)[step]
    return {CAUSES[i]: round(float(found[i]), 9) for i in np.flatnonzero(found > 1e-9)}


def test_phases_and_their_causes_have_the_same_numbers() -> None:
    assert [CAUSES[i] for i in range(1, len(PHASES))] == list(HOST_LATE) == [f"host: {name}" for name in PHASES[1:]]


@pytest.mark.parametrize("phase", [ADMIT, SCHEDULE, FILL, LAUNCH, COLLECT, COMMIT, MASKS, DELIVER])
def test_a_phase_that_fills_the_gap_is_its_cause(phase: int) -> None:
    assert causes(STEPS, make_marks((0, COLLECT), (10, phase), (21, COLLECT))) == {f"host: {PHASES[phase]}": 10}


def test_the_gap_is_split_between_the_phases_in_it() -> None:
    marks = make_marks(
        (0, COLLECT), (11, COMMIT), (13, DELIVER), (14, ADMIT), (15, SCHEDULE), (18, FILL), (19, LAUNCH), (22, COLLECT)
    )
    assert causes(STEPS, marks) == {
        "host: collect": 1, "host: commit": 2, "host: deliver": 1, "host: admit": 1, "host: schedule": 3,
        "host: fill": 1, "host: launch": 1,
    }  # fmt: skip


def test_a_wait_for_requests_means_that_there_was_nothing_to_run() -> None:
    assert causes(STEPS, make_marks((0, COLLECT), (10, IDLE), (18, SCHEDULE), (20, LAUNCH))) == {
        "nothing to run": 8,
        "host: schedule": 2,
    }


def test_a_wait_for_a_grammar_is_not_one_for_requests() -> None:
    marks = make_marks((0, COLLECT), (10, IDLE), (12, ADMIT), (13, IDLE | DRY_GRAMMAR), (18, ADMIT), (20, LAUNCH))
    assert causes(STEPS, marks) == {"nothing to run": 2, "host: admit": 3, "grammar": 5}


@pytest.mark.parametrize(
    ("dry", "cause"),
    [
        (DRY_DONE, "nothing to run"),
        (DRY_MEMORY, "memory pressure"),
        (DRY_ROWS, "no free row"),
        (DRY_GRAMMAR, "grammar"),
    ],
)
def test_a_dry_pipeline_has_its_reason(dry: int, cause: str) -> None:
    marks = make_marks((0, COLLECT | dry), (12, COMMIT | dry), (14, SCHEDULE | dry), (16, FILL), (20, COLLECT))
    assert causes(STEPS, marks) == {cause: 6, "host: fill": 4}


@pytest.mark.parametrize(
    ("flag", "phase", "cause"),
    [
        (EAGER, LAUNCH, "eager fallback"),
        (CAPTURED, LAUNCH, "graph capture"),
        (PREEMPTED, SCHEDULE, "memory pressure"),
    ],
)
def test_a_special_step_makes_its_phase_a_cause_of_its_own(flag: int, phase: int, cause: str) -> None:
    steps = make_steps([(0, 10), (20, 30)], queued=[0, 20], flags=[0, flag])
    marks = make_marks((0, COLLECT), (10, COMMIT), (12, phase), (20, COLLECT))
    assert causes(steps, marks) == {"host: commit": 2, cause: 8}


def test_idle_time_within_a_step_is_its_own_and_leaves_the_gap_alone() -> None:
    steps = make_steps([(0, 10), (20, 30)], queued=[0, 20], inside=[(0, 0, 0, 0), (3, 2, 1, 0.5)])
    marks = make_marks((0, COLLECT), (10, COMMIT), (20, COLLECT))
    assert causes(steps, marks) == {"host: commit": 10, "launch": 3, "compile": 2, "allocation": 1, "masks": 0.5}
    assert causes(steps, marks, step=0) == {}


def test_a_step_cannot_idle_for_longer_than_it_took() -> None:
    """Marks and the step's own events are read apart; a failed step has no length at all."""
    steps = make_steps([(0, 10), (10, 20), (NAN, NAN)], inside=[(15, 0, 0, 5), (10, 0, 0, 0), (1, 0, 0, 0)])
    assert steps.idle_inside.tolist() == [[7.5, 0, 0, 2.5], [10, 0, 0, 0], [0, 0, 0, 0]]


def test_a_late_copy_and_the_hand_over_after_it() -> None:
    steps = make_steps([(0, 10), (20, 30)], queued=[0, 12], copies=[(0, 0), (13, 18)])
    marks = make_marks((0, COLLECT), (10, LAUNCH), (12, COLLECT), (30, COMMIT))
    assert causes(steps, marks) == {"host: launch": 2, "copy late": 5, "hand-over": 3}


def test_a_copy_that_waits_for_the_copy_before_is_late_from_the_start() -> None:
    steps = make_steps([(0, 10), (20, 30)], queued=[0, 12], copies=[(0, 14), (14, 18)])
    assert causes(steps, make_marks((0, LAUNCH), (12, COLLECT), (30, COMMIT))) == {
        "host: launch": 2,
        "copy late": 6,
        "hand-over": 2,
    }


@pytest.mark.parametrize("is_own", [0, 1])
def test_a_garbage_collection_is_taken_out_of_the_phase_it_interrupts(is_own: int) -> None:
    collections = Collections(np.array([13.0]), np.array([16.0]), np.array([is_own], np.uint8))
    cpu = [0, NAN, 10 if is_own else 7, NAN]  # on another thread, the loop's own clock stands still
    marks = make_marks((0, COLLECT), (10, SCHEDULE), (20, COLLECT), (30, COMMIT), cpu=cpu)
    assert causes(STEPS, marks, collections) == {"garbage collection": 3, "host: schedule": 7}


def test_collections_outside_the_gap_do_not_matter() -> None:
    collections = Collections(np.array([2.0, 25.0]), np.array([4.0, 26.0]), np.array([1, 1], np.uint8))
    assert causes(STEPS, make_marks((0, COLLECT), (10, FILL), (20, COLLECT)), collections) == {"host: fill": 10}


def test_time_without_processor_is_the_interpreter_lock() -> None:
    # from 10 to 20 the thread had the processor for 4 seconds; the wait before and after does not count
    marks = make_marks(
        (0, COLLECT), (10, SCHEDULE), (15, LAUNCH), (20, COLLECT), (30, COMMIT), cpu=[0, NAN, NAN, 4, NAN]
    )
    assert causes(STEPS, marks) == {"host: schedule": 2, "host: launch": 2, "interpreter lock": 6}


def test_no_gap_no_cause() -> None:
    steps = make_steps([(0, 10), (10, 20), (19, 25)], queued=[0, 5, 12])
    marks = make_marks((0, SCHEDULE), (8, COLLECT), (11, SCHEDULE), (30, IDLE))
    assert not attribute(steps, marks, NO_COLLECTIONS, since=0.0).any()


def test_the_time_before_the_first_step_counts_from_the_begin() -> None:
    steps = make_steps([(5, 10)], queued=[4])
    assert causes(steps, make_marks((0, IDLE), (3, SCHEDULE), (4, COLLECT)), step=0) == {
        "nothing to run": 3,
        "host: schedule": 1,
        "hand-over": 1,
    }


def test_time_that_nobody_recorded_is_unknown() -> None:
    assert causes(STEPS, make_marks((17, SCHEDULE), (21, COLLECT))) == {"host: schedule": 3, "unknown": 7}


def test_a_step_that_never_ran_leaves_the_gap_to_the_next() -> None:
    steps = make_steps([(0, 10), (NAN, NAN), (20, 30)], queued=[0, 12, 20])
    marks = make_marks((0, COLLECT), (10, COMMIT), (14, SCHEDULE), (20, COLLECT))
    found = attribute(steps, marks, NO_COLLECTIONS, since=0.0)
    assert not found[1].any()
    assert causes(steps, marks, step=2) == {"host: commit": 4, "host: schedule": 6}


def test_nothing_recorded() -> None:
    assert attribute(make_steps([]), make_marks((0, IDLE)), NO_COLLECTIONS, 0.0).shape == (0, len(CAUSES))


@given(st.data())
def test_causes_add_up_to_the_idle_time(data: st.DataObject) -> None:
    """Whatever was recorded: every gap is accounted for exactly once, and nothing is negative."""
    length = st.floats(0, 3)
    n = data.draw(st.integers(1, 6))
    times = np.cumsum([data.draw(length) for _ in range(2 * n)])
    computes = list(zip(times[::2].tolist(), times[1::2].tolist(), strict=True))
    queued = [begin - data.draw(length) for begin, _ in computes]
    copies = [(q, q + data.draw(length)) for q in queued]
    phases = data.draw(st.lists(st.tuples(length, st.integers(0, 7), st.sampled_from([0, 16, 32, 48])), min_size=2))
    marks = make_marks(
        *zip(np.cumsum([p[0] for p in phases]).tolist(), [p[1] | p[2] for p in phases], strict=True),
        cpu=np.cumsum([data.draw(st.sampled_from([NAN, 0.5, 2.0])) for _ in phases]).tolist(),
    )
    cuts = np.cumsum([data.draw(length) + 1e-3 for _ in range(4)])
    collections = Collections(cuts[::2], cuts[1::2], np.array([0, 1], np.uint8))
    flags = [data.draw(st.integers(0, 15)) for _ in range(n)]
    found = attribute(make_steps(computes, queued=queued, copies=copies, flags=flags), marks, collections, since=0.0)
    idle = np.array(computes)[:, 0] - np.concatenate(([0.0], np.array(computes)[:-1, 1]))
    assert (found >= -1e-9).all()
    np.testing.assert_allclose(found.sum(axis=1), idle, atol=1e-6)
