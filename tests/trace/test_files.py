"""The trace file has the structure that viewers read, lanes in the terminal show the gaps, and names mean files."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made import NO_COLLECTIONS, make_marks, make_steps, simulated

from gapless.errors import ConfigError
from gapless.trace import page, perfetto, text
from gapless.trace.files import TraceFiles
from gapless.trace.timeline import Timeline, cut, load

PHASES = {"M", "X", "C"}


def parsed(*timelines: Timeline) -> dict[str, Any]:
    file = io.StringIO()
    perfetto.write(timelines, file)
    return json.loads(file.getvalue())


@pytest.fixture(scope="module")
def both() -> list[Timeline]:
    return [simulated(300, 1, seed=1), simulated(300, 2, seed=2)]


def test_the_file_is_what_viewers_of_trace_events_read(both: list[Timeline]) -> None:
    found = parsed(*both)
    assert found["displayTimeUnit"] == "ms"
    assert found["traceEvents"]
    for event in found["traceEvents"]:
        assert event["ph"] in PHASES
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert isinstance(event["tid"], int)
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())


def test_runs_are_processes_and_lanes_are_threads(both: list[Timeline]) -> None:
    events = parsed(*both)["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"].get("name") for e in events if e["ph"] == "M"}
    assert [names["process_name", pid, pid] for pid in (10, 20)] == ["depth 1", "depth 2"]
    lanes = ["CPU", "H2D", "GPU", "D2H", "GPU idle, by cause"]
    for pid in (10, 20):  # the thread with the process's id is its main one: viewers show it first
        assert [names["thread_name", pid, pid + i] for i in range(5)] == lanes
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == 10]
    for tid in (11, 12, 13):
        assert len([e for e in spans if e["tid"] == tid]) == 300
    host = {e["name"] for e in spans if e["tid"] == 10}
    assert host >= {"schedule", "fill", "launch", "collect", "commit", "deliver"}


def test_spans_of_a_lane_do_not_overlap(both: list[Timeline]) -> None:
    """Nor by a nanosecond, with times cut down as Perfetto's viewer does it: it drops a span that crosses another."""
    steps = both[1].steps  # back to back; a clock that is put right has some begin before the last one's end
    early = replace(steps, compute_begin=steps.compute_begin - np.arange(len(steps)) % 3 * 1e-7)
    spans = [e for e in parsed(both[0], replace(both[1], steps=early))["traceEvents"] if e["ph"] == "X"]
    assert len([e for e in spans if e["tid"] == 22]) == len(steps)
    for tid in {e["tid"] for e in spans}:
        times = [(int(e["ts"] * 1000.0), int(e["dur"] * 1000.0)) for e in spans if e["tid"] == tid]
        crossing = [(a, b) for a, b in pairwise(times) if sum(a) > b[0]]
        assert crossing == []


def test_a_step_says_what_it_is(both: list[Timeline]) -> None:
    events = parsed(both[0])["traceEvents"]
    step = next(e for e in events if e["name"] == "step 5")
    assert step["args"] == {"step": 5, "batch": 31, "tokens": 31, "in_flight": 1}
    assert step["dur"] == pytest.approx((both[0].steps.compute_end - both[0].steps.compute_begin)[4] * 1e6, abs=0.01)
    idle = [e for e in events if e["ph"] == "X" and e["tid"] == 14]
    assert sum(e["dur"] for e in idle) == pytest.approx(both[0].idle_s * 1e6, rel=1e-3)
    for event in idle:
        assert sum(event["args"]["us_by_cause"].values()) == pytest.approx(event["dur"], abs=0.1)
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert counters == {"batch size", "tokens/s"}


def test_the_summary_adds_up(both: list[Timeline]) -> None:
    runs = parsed(*both)["otherData"]["runs"]
    for run, timeline in zip(runs, both, strict=True):
        assert run["steps"] == 300
        assert sum(run["idle_by_cause"].values()) == pytest.approx(run["idle_s"])
        assert run["tokens"] == int(timeline.steps.num_rows.sum())
    assert runs[0]["idle_share"] > 0.05 > 0.001 > runs[1]["idle_share"]


def test_a_timeline_is_the_same_after_saving(both: list[Timeline], tmp_path: Path) -> None:
    both[0].save(tmp_path / "t.npz")
    found = load(tmp_path / "t.npz")
    assert parsed(found) == parsed(both[0])


def test_a_part_of_a_timeline_has_the_steps_under_way_in_it(both: list[Timeline]) -> None:
    whole = both[1]
    since, until = float(whole.steps.compute_begin[100]) + 1e-6, float(whole.steps.compute_begin[200])
    found = cut(whole, since, until)
    assert (found.began, found.ended) == (since, until)
    assert found.steps.step[0] <= 101 <= found.steps.step[1]
    assert found.steps.step[-1] >= 201
    assert found.marks.time[0] == since
    assert (found.marks.time <= until).all()


def test_waits_for_requests_at_both_ends_are_left_out() -> None:
    marks = make_marks((0, 0), (5, 2), (6, 5), (9, 6), (10, 0))
    found = Timeline("x", 0.0, 50.0, make_steps([(6, 9)], queued=[6]), marks, NO_COLLECTIONS).trimmed()
    assert (found.began, found.ended) == (5, 10)
    nothing = Timeline("x", 0.0, 50.0, make_steps([]), make_marks((0, 0)), NO_COLLECTIONS)
    assert nothing.trimmed() is nothing
    assert parsed(nothing)["otherData"]["runs"][0]["steps"] == 0


@pytest.mark.parametrize("name", ["T", "T.json", "T.html"])
def test_one_name_means_two_files(name: str, tmp_path: Path, both: list[Timeline]) -> None:
    files = TraceFiles.at(str(tmp_path / name))
    assert (files.json, files.html) == (tmp_path / "T.json", tmp_path / "T.html")
    files.write(both)
    assert json.loads(files.json.read_text())["traceEvents"]
    assert files.html.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("name", ["no/such/folder/T.json", ""])
def test_a_place_that_is_not_there_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        TraceFiles.at(name)
    (tmp_path / "x.json").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        TraceFiles.at("x.json")


def test_a_page_cannot_be_broken_by_a_name(both: list[Timeline], tmp_path: Path) -> None:
    odd = replace(both[0], facts={**both[0].facts, "model": "</script><b>"})
    assert page.render([odd], "a < b").count("</script>") == 2
    assert "<title>a &lt; b</title>" in page.render([odd], "a < b")


# -- in the terminal -----------------------------------------------------------------------------------------------


def lanes(drawn: str, label: str) -> dict[str, str]:
    lines = drawn.split("\n")
    start = lines.index(label) + 1
    return {line[:5].strip(): line[5:] for line in lines[start : start + 4]}


@pytest.mark.parametrize("step_s", [1.6e-3, 30e-3])
def test_gaps_are_seen_at_depth_1_and_not_at_depth_2(step_s: float) -> None:
    """With short steps and with long ones, in which a gap is a hundredth: the scale is chosen to show it."""
    drawn = text.draw([simulated(200, depth, step_s=step_s) for depth in (1, 2)], 100, text.BLOCKS)
    one, two = lanes(drawn, "depth 1"), lanes(drawn, "depth 2")
    assert list(one) == ["CPU", "H2D", "GPU", "D2H"]
    assert all(len(line) == 95 for line in (*one.values(), *two.values()))
    assert "     " in one["GPU"]
    assert " " not in two["GPU"]
    assert one["GPU"].count("█") > 40
    assert "·" in one["CPU"]
    assert "one character" in drawn


def test_plain_characters_where_others_cannot_be_printed() -> None:
    assert text.style_for("utf-8") is text.BLOCKS
    assert text.style_for("ascii") is text.style_for(None) is text.style_for("no such thing") is text.ASCII
    drawn = text.draw([simulated(50, 1)], 80, text.ASCII)
    assert set(lanes(drawn, "depth 1")["GPU"]) <= set(text.ASCII.shades)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_run_of_hardly_any_steps_can_be_drawn(num_steps: int) -> None:
    computes = [(float(i), i + 0.5) for i in range(num_steps)]
    timeline = Timeline("few", 0.0, 3.0, make_steps(computes), make_marks((0, 0), (1, 2)), NO_COLLECTIONS)
    assert len(lanes(text.draw([timeline], 60, text.BLOCKS), "few")) == 4


@pytest.mark.parametrize(("seconds", "words"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.2e-5, "42 µs"), (0, "0 µs")])
def test_times_are_readable(seconds: float, words: str) -> None:
    assert text.readable_s(seconds) == words
    assert np.isfinite(seconds)
