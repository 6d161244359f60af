"""Playing a schedule: the same every time, arrivals and aborts by step, failures where the schedule has them."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from gapless.core.block_pool import BlockPool
from gapless.core.params import SamplingParams
from gapless.proof.play import Played, play
from gapless.proof.schedule import Ask, Schedule
from gapless.proof.stage import ModelStage
from gapless.proof.tiny import FAMILIES, tiny_stage

GREEDY = SamplingParams(max_tokens=6, temperature=0)
SIZES = {"num_rows": 3, "num_blocks": 40, "block_size": 4, "max_batch_tokens": 12, "max_model_len": 96}


def ask(name: str, *, first: int = 1, count: int = 9, **changes: object) -> Ask:
    return replace(Ask(name, tuple(range(first, first + count)), GREEDY, 0), **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def stage() -> ModelStage:
    return tiny_stage("llama")


def test_the_same_schedule_gives_the_same_run(stage: ModelStage) -> None:
    schedule = Schedule((ask("a"), ask("b", first=30, arrival=2)), **SIZES, depth=2, order=5)
    first, second = play(stage, schedule), play(stage, schedule)
    assert (first.tokens, first.batches) == (second.tokens, second.batches)
    assert first.trouble is None
    assert first.num_accesses > 50


def test_requests_come_before_the_step_they_name(stage: ModelStage) -> None:
    schedule = Schedule((ask("a"), ask("b", first=30, arrival=3)), **SIZES)
    for depth in (1, 2, 3):
        batches = play(stage, replace(schedule, depth=depth, order=1)).batches
        assert next(step for step, batch in enumerate(batches) if any(m.request == "b" for m in batch.members)) == 3


def test_a_request_far_in_the_future_comes_when_nothing_is_left_to_do(stage: ModelStage) -> None:
    played = play(stage, Schedule((ask("a"), ask("b", arrival=1000)), **SIZES, depth=2))
    assert played.reasons == {"a": "length", "b": "length"}


def test_aborts_cut_off_at_their_step(stage: ModelStage) -> None:
    whole = play(stage, Schedule((ask("a"),), **SIZES)).tokens["a"]
    played = play(stage, Schedule((ask("a", abort=3),), **SIZES))
    assert (played.reasons["a"], played.tokens["a"]) == ("abort", whole[:3])


def test_a_stop_string_ends_a_request_from_outside(stage: ModelStage) -> None:
    assert stage.tokenizer is not None
    whole = play(stage, Schedule((ask("a"),), **SIZES)).tokens["a"]
    stop = stage.tokenizer.decode([whole[2]])
    params = replace(GREEDY, stop=(stop,))
    played = play(stage, Schedule((ask("a", params=params),), **SIZES, depth=3, order=2))
    end = whole.index(whole[2]) + 1
    assert (played.reasons["a"], played.tokens["a"]) == ("stop", whole[:end])


def test_a_step_that_is_made_to_fail_fails_its_own_requests(stage: ModelStage) -> None:
    asks = (ask("a"), ask("b", first=40, arrival=4))
    played = play(stage, Schedule(asks, **SIZES, depth=2, order=1, failures=(2,)))
    assert played.trouble is None
    assert played.reasons == {"a": "error", "b": "length"}


def test_broken_bookkeeping_is_trouble_and_no_crash(stage: ModelStage) -> None:
    with patch.object(BlockPool, "release", lambda self, blocks: None):
        played = play(stage, Schedule((ask("a"),), **SIZES))
    assert played.trouble is not None
    assert played.trouble.kind == "invariant"
    assert "reference counts differ" in played.trouble.message


@pytest.mark.parametrize("family", FAMILIES)
def test_earlier_runs_leave_no_trace(family: str) -> None:
    stage = tiny_stage(family)
    schedule = Schedule((ask("a"), ask("b", first=20)), **SIZES, depth=2, order=1)
    first: Played = play(stage, schedule)
    play(stage, Schedule((ask("x", first=50, count=30), ask("y", first=3)), **SIZES, depth=3, order=9))
    assert play(stage, schedule).tokens == first.tokens
