"""A recorded trace is one that the simulator reads, without any token of a prompt."""

from __future__ import annotations

import asyncio
import json
from array import array
from pathlib import Path

import pytest

from gapless.core.params import SamplingParams
from gapless.errors import ConfigError
from gapless.server.request_trace import HASH_TOKENS, RequestTrace
from gapless.server.roster import Flight
from gapless.sim.arrivals import prompt_of, read_arrivals

SYSTEM = list(range(1000, 1000 + 3 * HASH_TOKENS))


def ended(number: int, prompt: list[int], num_tokens: int, arrived_s: float) -> Flight:
    flight = Flight(number, prompt, SamplingParams(), asyncio.Event(), array("i", range(num_tokens)))
    flight.arrived_s, flight.first_token_s, flight.over_s = arrived_s, arrived_s + 0.25, arrived_s + 1.5
    flight.num_cached = 16
    return flight


def test_a_recorded_trace_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    trace = RequestTrace(str(path))
    trace.add(ended(1, [*SYSTEM, 7, 8], 5, 102.0))
    trace.add(ended(0, [*SYSTEM, 9], 3, 100.0))
    trace.add(ended(2, SYSTEM, 0, 103.0))
    trace.close()
    RequestTrace(str(path)).add(ended(3, [1, 2, 3], 4, 104.5))  # a server that was started again
    found = read_arrivals(str(path))
    assert [round(arrival.at_s, 2) for arrival in found] == [0.0, 2.0, 4.5]
    assert [(arrival.num_prompt, arrival.num_output) for arrival in found] == [(49, 3), (50, 5), (3, 4)]
    first, second, third = (prompt_of(arrival, number).tolist() for number, arrival in enumerate(found))
    assert first[: len(SYSTEM)] == second[: len(SYSTEM)]
    assert first[len(SYSTEM) :] != second[len(SYSTEM) : len(SYSTEM) + 1]
    assert third != first[:3]


def test_no_token_is_written_and_times_are(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    RequestTrace(str(path)).add(ended(0, SYSTEM, 3, 100.0))
    text = path.read_text()
    row = json.loads(text)
    assert (row["first_token_s"], row["end_s"], row["cached_tokens"]) == (0.25, 1.5, 16)
    assert all(0 <= value < 2**53 for value in row["hashes"])
    assert not set(row["hashes"]) & set(SYSTEM)
    assert len(row["hashes"]) == 3


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record_trace .*: Is a directory"):
        RequestTrace(str(tmp_path))


def test_a_full_disk_ends_the_recording_only(caplog: pytest.LogCaptureFixture) -> None:
    trace = RequestTrace("/dev/full")
    for number in range(3):
        trace.add(ended(number, SYSTEM, 3, 100.0))
    assert sum("requests are not recorded any more" in record.message for record in caplog.records) == 1
