"""Shrinking keeps what matters and drops the rest."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gapless.proof.draw import Menu, draw_asks, draw_schedule
from gapless.proof.schedule import Schedule
from gapless.proof.shrink import shrink
from gapless.proof.tiny import ROOM


def big(seed: int) -> Schedule:
    dice = random.Random(seed)
    asks = draw_asks(dice, 97, 8, 8, text_stops=True)
    schedule = draw_schedule(dice, asks, ROOM, Menu(most_requests=10, failing_share=1.0))
    return replace(schedule, depth=3)


@pytest.mark.parametrize("seed", range(5))
def test_what_does_not_matter_goes(seed: int) -> None:
    schedule = big(seed)
    wanted = schedule.asks[-1].prompt[0]
    shrunk = shrink(schedule, lambda s: any(wanted in ask.prompt for ask in s.asks), most_blocks=schedule.num_blocks)
    (ask,) = shrunk.schedule.asks
    assert ask.prompt == (wanted,)
    assert (ask.arrival, ask.abort, ask.params.max_tokens, ask.params.temperature) == (0, None, 1, 0)
    assert (shrunk.schedule.depth, shrunk.schedule.failures, shrunk.schedule.order) == (1, (), None)


def test_what_matters_stays() -> None:
    schedule = big(1)

    def fails(s: Schedule) -> bool:
        return s.depth >= 2 and len(s.asks) >= 2 and sum(len(ask.prompt) for ask in s.asks) >= 5

    shrunk = shrink(schedule, fails, most_blocks=schedule.num_blocks).schedule
    assert (shrunk.depth, len(shrunk.asks)) == (2, 2)
    assert sum(len(ask.prompt) for ask in shrunk.asks) == 5


def test_it_gives_up_in_time() -> None:
    schedule = big(2)
    shrunk = shrink(schedule, lambda s: False, most_blocks=schedule.num_blocks, most_tries=7)
    assert (shrunk.schedule, shrunk.num_tried) == (schedule, 7)
