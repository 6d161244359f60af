"""Variants of a request: always the same few, with stops that are met."""

from __future__ import annotations

import random

import pytest

from gapless.core.params import SamplingParams
from gapless.proof.draw import Menu, draw_schedule
from gapless.proof.judge import Judge
from gapless.proof.schedule import Ask
from gapless.proof.tiny import tiny_stage
from gapless.proof.vary import NUM_VARIANTS, Variety

ASKS = [Ask(f"r{i}", tuple(range(i + 1, i + 9)), SamplingParams(max_tokens=6, temperature=0), i) for i in range(12)]


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(tiny_stage("llama"), 6)


@pytest.fixture(scope="module")
def variants(judge: Judge) -> list[Ask]:
    variety = Variety(lambda ask: judge.alone(ask).tokens, tiny_stage("llama").tokenizer)
    return [variety.variant(ask, number) for ask in ASKS for number in range(1, NUM_VARIANTS)]


def test_there_is_a_bit_of_everything(judge: Judge, variants: list[Ask]) -> None:
    params = [ask.params for ask in variants]
    for some in (
        [p for p in params if p.temperature > 0],
        [p for p in params if p.temperature == 0],
        [p for p in params if p.logprobs is not None],
        [p for p in params if p.prompt_logprobs is not None],
        [p for p in params if p.stop],
        [p for p in params if p.min_tokens],
        [ask for ask in variants if ask.stop_ids],
    ):
        assert 3 < len(some) < len(variants)
    assert sum(judge.alone(ask).reason == "stop" for ask in variants) > len(variants) // 4


def test_they_are_the_same_each_time(judge: Judge, variants: list[Ask]) -> None:
    again = Variety(lambda ask: judge.alone(ask).tokens, tiny_stage("llama").tokenizer)
    assert again.variant(ASKS[2], 1) == variants[2 * (NUM_VARIANTS - 1)]
    found = {again(random.Random(seed), ASKS[0]) for seed in range(40)}
    assert found == {ASKS[0], *variants[: NUM_VARIANTS - 1]}


def test_without_a_tokenizer_there_are_no_stop_strings(judge: Judge) -> None:
    variety = Variety(lambda ask: judge.alone(ask).tokens, None)
    assert not any(variety.variant(ask, number).params.stop for ask in ASKS for number in (1, 2, 3))


def test_a_prompt_that_comes_several_times_at_once_has_a_seed_each() -> None:
    room = tiny_stage("llama").room
    for seed in range(12):
        asks = draw_schedule(random.Random(seed), ASKS, room, Menu(repeated_share=1.0)).asks
        copies = [ask for ask in asks if ".n" in ask.id]
        assert len(copies) >= 2
        assert len({ask.prompt for ask in copies}) == len({ask.arrival for ask in copies}) == 1
        assert len({ask.seed for ask in copies}) == len({ask.id for ask in asks if ".n" in ask.id}) == len(copies)
