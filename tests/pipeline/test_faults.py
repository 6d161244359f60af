"""Every single mistake of the table is seen by somebody, and where nothing is wrong nothing is seen."""

from __future__ import annotations

import pytest
from fault import TOY, Fault
from faults import ALL, FAULTS, STAGES, all_who_see, is_seen, judge, schedules

from gapless.core.request import Request, int_array
from toy import toy_truth


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_mistake_is_seen(fault: Fault) -> None:
    assert is_seen(fault)


@pytest.mark.parametrize("stage", STAGES)
def test_without_a_mistake_nothing_is_seen(stage: str) -> None:
    assert not is_seen(Fault("none", stage=stage))
    assert not all_who_see(Fault("none", stage=stage))


def test_what_a_request_gives_alone_is_the_toys_truth() -> None:
    for ask in {ask for schedule in schedules(TOY) for ask in schedule.asks}:
        request = Request(ask.id, int_array(ask.prompt), ask.params, ask.seed, ask.stop_ids, ask.length)
        assert judge(TOY).alone(ask).tokens == tuple(toy_truth(request, ask.rule))


def test_the_table_is_long_and_names_each_mistake_once() -> None:
    assert len(ALL) >= 75
    assert len({fault.name for fault in ALL}) == len(ALL)


def test_what_the_tokens_cannot_show_is_seen_all_the_same() -> None:
    """A step that comes back with the error of the next one."""
    assert all_who_see(next(fault for fault in ALL if fault.name == "slots share d2h_over"))
