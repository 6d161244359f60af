"""The recorder: what is told comes out, sums do not depend on when they are made, and readers may come at any time."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from gapless import LLM, SamplingParams
from gapless.device import base
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.pipeline.executor import LocalExecutor
from gapless.report import OverlapMeter
from gapless.trace import recorder as module
from gapless.trace.causes import CAUSES
from gapless.trace.columns import (
    ADMIT,
    COLLECT,
    COMMIT,
    DELIVER,
    DRY_DONE,
    DRY_GRAMMAR,
    DRY_ROWS,
    EAGER,
    FILL,
    IDLE,
    INSIDE,
    LAUNCH,
    PREEMPTED,
    SCHEDULE,
)
from gapless.trace.null_recorder import NullRecorder
from gapless.trace.recorder import Recorder
from tiny import CPU
from toy import LIMITS, run_toy, toy_requests, toy_runner

GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
STEP_PHASES = (SCHEDULE, FILL, LAUNCH)


@dataclass
class Counts:
    num_preemptions: int = 0


@pytest.fixture
def recorder() -> Any:
    found = Recorder(kept_steps=None)
    found.start()
    yield found
    found.close()


def play(recorder: Recorder, step: int) -> None:
    """One step at depth 1 that computes for no time at all."""
    for phase in STEP_PHASES:
        recorder.mark(phase)
    recorder.launched(step, num_rows=3, num_tokens=5, num_blocks=2)
    recorder.mark(COLLECT)
    now = time.perf_counter()
    recorder.collected((now, now, now, now + 1e-7, now + 1e-7, now + 2e-7, 0, 0, 0, 0))
    for phase in (COMMIT, DELIVER, ADMIT):
        recorder.mark(phase)


def test_what_is_told_comes_out(recorder: Recorder) -> None:
    play(recorder, 7)
    recorder.mark(IDLE)
    found = recorder.timeline("x", depth=1)
    assert (found.label, found.facts, len(found.steps)) == ("x", {"depth": 1}, 1)
    assert (found.steps.step[0], found.steps.num_rows[0], found.steps.num_tokens[0], found.steps.num_blocks[0]) == (
        7,
        3,
        5,
        2,
    )
    assert found.marks.code.tolist() == [IDLE, SCHEDULE, FILL, LAUNCH, COLLECT, COMMIT, DELIVER, ADMIT, IDLE]
    assert (np.diff(found.marks.time) >= 0).all()
    assert np.isnan(found.marks.cpu).tolist() == [False, True, True, True, False, True, True, True, False]
    assert found.phase_steps.tolist() == [0, 7, 7, 7, 7, 7, 7, 0, 0]
    assert recorder.busy_s == pytest.approx(1e-7, rel=0.01)


def test_sums_do_not_depend_on_when_they_are_made(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folding every few steps, in the middle of things, gives what one pass over all columns gives."""
    monkeypatch.setattr(module, "FOLD_STEPS", 7)
    for step in range(1, 60):
        play(recorder, step)
        if step == 30:
            gc.collect()
    recorder.mark(IDLE)
    assert len(recorder._folds) > 5
    whole = recorder.timeline()
    assert whole.steps.step.tolist() == list(range(1, 60))
    assert len(whole.marks) == 1 + 59 * 7 + 1
    summed = recorder.idle_by_cause()
    for cause, seconds in whole.idle_by_cause.items():
        if cause != "nothing to run":  # that one still grows
            assert summed[cause] == pytest.approx(seconds, abs=1e-9)


def test_memory_is_bounded_unless_everything_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FOLD_STEPS", 4)
    for kept_steps, expected in ((None, 400), (64, 64 + 8)):
        recorder = Recorder(kept_steps=kept_steps)
        recorder.start()
        for step in range(400):
            play(recorder, step)
        recorder.close()
        kept = recorder.timeline()
        assert len(kept.steps) == expected if kept_steps is None else len(kept.steps) <= expected
        assert kept.steps.step[-1] == 399
        assert len(recorder._marks) < 3 * 7 * 16
        assert "unknown" not in kept.idle_by_cause or kept.idle_by_cause["unknown"] < 1e-6
        assert kept.idle_s < kept.seconds


def test_the_first_sum_of_a_process_loads_nothing() -> None:
    """It falls into a step's launch, and loading took 50 ms and more there."""
    code = """
import sys, time
from gapless.trace.columns import COLLECT, FILL, LAUNCH
from gapless.trace.recorder import FOLD_STEPS, Recorder
recorder = Recorder()
recorder.start()
before = set(sys.modules)
for step in range(FOLD_STEPS + 1):
    recorder.mark(FILL)
    recorder.mark(LAUNCH)
    recorder.launched(step, 1, 1, 0)
    recorder.mark(COLLECT)
    recorder._on_gc("start", {})
    recorder._on_gc("stop", {})
    recorder.collected((*(time.perf_counter(),) * 6, 0.0, 0.0, 0.0, 0.0))
print(len(recorder._folds), sorted(set(sys.modules) - before))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "1 []\n"


def test_the_flags_of_a_step_come_from_what_is_watched() -> None:
    counts, missed = Counts(), Counter[str]()
    recorder = Recorder(counts=counts, missed=missed)
    recorder.start()
    play(recorder, 1)
    counts.num_preemptions = 2
    play(recorder, 2)
    missed["no graph: prefill"] += 1
    missed["no native call: why"] += 1
    play(recorder, 3)
    missed["no native call: why"] += 1
    play(recorder, 4)
    recorder.close()
    assert recorder.timeline().steps.flags.tolist() == [0, PREEMPTED, EAGER, 0]
    assert recorder.ledger == {"preemption": 2}


def test_a_dry_pipeline_is_counted_once_and_marked_until_there_is_a_plan(recorder: Recorder) -> None:
    play(recorder, 1)
    recorder.mark(SCHEDULE)
    recorder.dry(DRY_DONE, "everything is in flight")
    recorder.mark(COLLECT)
    recorder.mark(SCHEDULE)
    recorder.dry(DRY_DONE, "everything is in flight")
    play(recorder, 2)
    assert recorder.ledger == {"pipeline ran dry: everything is in flight": 1}
    codes = recorder.timeline().marks.code.tolist()[8:]
    assert codes == [
        SCHEDULE,
        *(phase | DRY_DONE for phase in (COLLECT, SCHEDULE, SCHEDULE)),
        FILL,
        LAUNCH,
        COLLECT,
        COMMIT,
        DELIVER,
        ADMIT,
    ]


def test_a_step_that_waits_for_its_launches_is_counted(recorder: Recorder) -> None:
    for waited in (0.5, 0.05, 0.0):
        recorder.launched(1, 1, 1, 0)
        recorder.collected((0, 0, 1, 2, 2, 2, waited, 0, 0, 0))
    assert recorder.ledger == {"step without a graph, paced by its launch": 1}


def test_idle_time_within_a_step_is_not_busy(recorder: Recorder) -> None:
    began = time.perf_counter()
    for step, inside in enumerate([(0.25, 0, 0, 0.0625), (0, 0.5, 0.125, 0), (0, 0, 0, 0)]):
        recorder.launched(step, 1, 1, 0)
        recorder.collected((began, began, began + step, began + step + 1, began + 4, began + 4, *inside))
    found, idle = recorder.timeline(), recorder.idle_by_cause()
    assert recorder.busy_s == pytest.approx(3 - 0.9375)
    assert [idle[cause] for cause in INSIDE] == [0.25, 0.5, 0.125, 0.0625]
    assert found.busy_s == pytest.approx(recorder.busy_s)
    assert found.idle_share == pytest.approx(0.9375 / 3)
    assert {cause: found.idle_by_cause[cause] for cause in INSIDE} == {cause: idle[cause] for cause in INSIDE}


def test_a_device_and_its_recorder_mean_the_same_causes() -> None:
    assert INSIDE == base.INSIDE


def test_blocks_in_flight_are_those_of_steps_not_yet_back(recorder: Recorder) -> None:
    recorder.launched(1, 1, 1, 3)
    recorder.launched(2, 1, 1, 4)
    assert (recorder.num_blocks_in_flight, recorder.max_blocks_in_flight) == (7, 7)
    recorder.collected((0.0,) * 10)
    assert (recorder.num_blocks_in_flight, recorder.max_blocks_in_flight) == (4, 7)
    assert recorder.timeline().steps.in_flight.tolist() == [1]


def test_collections_are_seen_until_it_is_closed() -> None:
    recorder = Recorder()
    recorder.start()
    gc.collect()  # with nothing to run: of no interest
    recorder.mark(SCHEDULE)
    gc.collect()
    other = threading.Thread(target=gc.collect)
    other.start()
    other.join()
    recorder.close()
    gc.collect()
    found = recorder.timeline().collections
    assert found.is_own.tolist() == [1, 0]
    assert (found.end >= found.begin).all()
    assert recorder._on_gc not in gc.callbacks


def test_one_that_records_nothing_is_told_everything_and_says_nothing() -> None:
    listeners = list(gc.callbacks)
    recorder = NullRecorder()
    recorder.start()
    recorder.woken()
    play(recorder, 7)
    recorder.dry(DRY_ROWS, "no free row")
    recorder.failed()
    gc.collect()
    found = recorder.timeline()
    assert gc.callbacks == listeners
    assert len(found.steps) == len(found.marks) == recorder.num_blocks_in_flight == 0
    assert recorder.busy_s == 0
    assert not recorder.ledger
    assert not any(recorder.idle_by_cause().values())
    assert recorder.tail(1.0)["gpu"] == []


def test_only_recorded_steps_are_timed() -> None:
    device = CpuDevice(driver=InlineDriver())
    with patch.object(device, "timer") as timer:
        LocalExecutor(device, toy_runner(device, LIMITS), LIMITS, 2, NullRecorder())
        assert not timer.called


def test_nothing_to_run_grows_while_nothing_runs(recorder: Recorder) -> None:
    before = recorder.idle_by_cause()["nothing to run"]
    time.sleep(0.02)
    assert recorder.idle_by_cause()["nothing to run"] - before >= 0.02


def test_a_wait_for_a_grammar_grows_while_it_is_compiled(recorder: Recorder) -> None:
    recorder.dry(DRY_GRAMMAR, "requests are held")
    recorder.mark(IDLE)
    before = recorder.idle_by_cause()
    time.sleep(0.02)
    after = recorder.idle_by_cause()
    assert after["grammar"] - before["grammar"] >= 0.02
    assert after["nothing to run"] == before["nothing to run"]


@pytest.mark.parametrize("seed", [None, 3])
def test_any_executor_of_the_cpu_records_every_step(seed: int | None) -> None:
    """With threads, in a seeded order, and inline: device parts lie inside the host's begin and end of the step."""
    for driver in (None, InlineDriver()):
        device = CpuDevice(seed=seed, driver=driver)
        recorder = Recorder(kept_steps=None)
        executor = LocalExecutor(device, toy_runner(device, LIMITS), LIMITS, 2, recorder)
        run_toy(executor, toy_requests(), depth=2)
        recorder.close()
        s = recorder.timeline().steps
        order = (s.h2d_begin, s.h2d_end, s.compute_begin, s.compute_end, s.d2h_begin, s.d2h_end, s.collected)
        assert len(s) > 10
        for earlier, later in itertools.pairwise(order):
            assert (earlier <= later).all()
        assert (s.compute_begin[1:] >= s.compute_end[:-1]).all()


# -- on real runs --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[1, 2, 3])
def traced(request: pytest.FixtureRequest, tiny_dir: Path) -> Any:
    """An engine after a run with chunks, several waves of requests and preemptions."""
    options: dict[str, Any] = {"num_blocks": 14, "max_num_rows": 4, "max_batch_tokens": 24, "trace": True}
    with LLM(tiny_dir, **CPU, depth=request.param, **options) as llm:
        before = llm.stats()
        for wave in range(4):
            prompts = [[wave * 7 + i + 1] * (5 + 9 * i) for i in range(7)]
            llm.generate(prompts, GREEDY)
        yield llm, before, llm.stats()


def test_idle_time_has_a_cause(traced: Any) -> None:
    """Of the time in which the compute stream did nothing, at least 95% is explained."""
    llm, before, after = traced
    found = llm.engine.monitor.timeline(before=before)
    explained = sum(seconds for cause, seconds in found.idle_by_cause.items() if cause != "unknown")
    last = float(found.steps.compute_end[-1])
    idle = (last - found.began) - found.busy_s
    assert idle > 0
    assert explained >= 0.95 * idle
    assert explained <= idle * 1.0001
    assert after.busy_s - before.busy_s == pytest.approx(found.busy_s)


def test_steps_in_flight_are_as_deep_as_asked(traced: Any) -> None:
    llm, _, after = traced
    found = llm.engine.monitor.timeline()
    assert len(found.steps) == after.num_steps
    assert found.steps.in_flight.max() == llm.engine.monitor.depth
    assert int(found.steps.num_rows.sum()) == after.num_generated + after.num_overrun
    assert llm.engine.monitor.ledger().get("preemption", 0) == after.num_preemptions > 0
    assert llm.engine.monitor.waste()["wasted_tokens"] == after.num_overrun
    assert llm.engine.monitor.waste()["blocks_in_flight"] == 0 < llm.engine.monitor.waste()["max_blocks_in_flight"]


def test_the_tail_is_plain_lists_of_the_last_seconds(traced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    llm, *_ = traced
    monkeypatch.setattr(module, "TAIL_STEPS", 1000)
    found = llm.engine.monitor.timeline_tail(1000.0)
    assert set(found) == {"seconds", "cpu", "h2d", "gpu", "d2h"}
    assert json.loads(json.dumps(found)) == found
    assert len(found["gpu"]) == len(found["h2d"]) == len(found["d2h"]) == llm.stats().num_steps
    for lane in ("cpu", "h2d", "gpu", "d2h"):
        for begin, end, name, step in found[lane]:
            assert -1000 <= begin <= end <= 0
            assert isinstance(name, str)
            assert isinstance(step, int)
    assert llm.engine.monitor.timeline_tail(1e-9)["gpu"] == []


def test_the_tail_is_bounded_and_says_how_far_it_reaches(traced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, *_ = traced
    monkeypatch.setattr(module, "TAIL_STEPS", 5)
    found = llm.engine.monitor.timeline_tail(1000.0)
    assert len(found["gpu"]) == len(found["d2h"]) == 5
    assert 0 < found["seconds"] < 1000
    assert all(-found["seconds"] <= end for _, end, *_ in found["cpu"])


def test_switched_off_it_is_told_nothing_and_the_summary_says_so(tiny_dir: Path) -> None:
    listeners = list(gc.callbacks)
    found = []
    for record in (True, False):
        with LLM(tiny_dir, **CPU, depth=2, record=record) as llm:
            meter = OverlapMeter(llm.engine.monitor)
            params = SamplingParams(max_tokens=8, temperature=0)
            found.append([item.token_ids for item in llm.generate([[1, 2, 3], [4, 5]], params)])
            summary = meter.summary()
            assert ("not recorded" in summary) is not record
            assert ("idle:" in summary) is record
            assert (gc.callbacks == listeners) is not record
            assert any(llm.engine.monitor.idle_by_cause().values()) is record
            assert len(llm.engine.monitor.timeline().marks) > 0 or not record
    assert found[0] == found[1]


def test_readers_do_not_disturb(tiny_dir: Path) -> None:
    """Causes and tails are read all the time by another thread; sums only grow, and the run ends as it should."""
    with LLM(tiny_dir, **CPU, depth=2, num_blocks=64) as llm:
        stop, readings, errors = threading.Event(), [llm.engine.monitor.idle_by_cause()], []

        def read() -> None:
            try:
                while not stop.is_set():
                    readings.append(llm.engine.monitor.idle_by_cause())
                    llm.engine.monitor.timeline_tail(0.05)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        for _ in range(6):
            llm.generate([[1, 2, 3], [4] * 20, [5, 6]], SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
        stop.set()
        thread.join()
        assert llm.stats().num_steps > module.FOLD_STEPS
    assert errors == []
    assert set(readings[0]) == set(CAUSES)
    for cause in CAUSES:
        values = [reading[cause] for reading in readings]
        assert all(later >= earlier - 1e-6 for earlier, later in itertools.pairwise(values)), cause
