"""Schedules are values: written, read back, drawn again from the same dice."""

from __future__ import annotations

import json
import random

import pytest

from gapless.errors import ConfigError
from gapless.proof.draw import Menu, draw_asks, draw_schedule
from gapless.proof.schedule import Schedule
from gapless.proof.tiny import ROOM, VOCAB_SIZE

MENU = Menu(failing_share=0.5, block_sizes=(1, 3, 16))


def drawn(seed: int, menu: Menu = MENU) -> Schedule:
    dice = random.Random(seed)
    return draw_schedule(dice, draw_asks(dice, VOCAB_SIZE, 6, 8, text_stops=True), ROOM, menu)


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_survives_json(seed: int) -> None:
    schedule = drawn(seed)
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule
    assert drawn(seed) == schedule
    assert hash(drawn(seed)) == hash(schedule)


@pytest.mark.parametrize("seed", range(60))
def test_every_drawn_schedule_can_run(seed: int) -> None:
    schedule = drawn(seed)
    room = ROOM.limits(schedule.block_size)
    assert 1 <= schedule.num_rows <= min(room.num_rows, schedule.max_batch_tokens)
    assert schedule.num_blocks <= room.num_blocks
    longest = max(min(ask.length, ROOM.max_model_len) for ask in schedule.asks)
    assert longest <= schedule.num_blocks * schedule.block_size
    assert len({ask.id for ask in schedule.asks}) == len(schedule.asks)


def test_a_steady_schedule_has_nothing_that_ends_early() -> None:
    for seed in range(20):
        schedule = drawn(seed, Menu(steady_share=1.0))
        assert schedule.num_rows == len(schedule.asks)
        assert not any(ask.stop_ids or ask.params.stop for ask in schedule.asks)


@pytest.mark.parametrize("value", [{}, [], {"asks": []}, {"asks": [{"prompt": 3}], "failures": []}])
def test_what_is_no_schedule_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="not a schedule"):
        Schedule.from_json(value)


def test_a_schedule_describes_itself_in_a_line() -> None:
    text = drawn(3).describe()
    assert text.startswith("depth 2, ")
    assert "\n" not in text
