"""Every single mistake of the table is seen by somebody, and where nothing is wrong nothing is seen."""

from __future__ import annotations

import pytest
from faults import ALL, FAULTS, NONE, Fault, all_who_see, is_seen


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_mistake_is_seen(fault: Fault) -> None:
    assert is_seen(fault)


def test_without_a_mistake_nothing_is_seen() -> None:
    assert not is_seen(NONE)
    assert not all_who_see(NONE)


def test_the_table_is_long_and_names_each_mistake_once() -> None:
    assert len(ALL) >= 60
    assert len({fault.name for fault in ALL}) == len(ALL)


def test_what_the_tokens_cannot_show_is_seen_all_the_same() -> None:
    """A step that comes back with the error of the next one."""
    assert all_who_see(next(fault for fault in ALL if fault.name == "slots share d2h_over"))
