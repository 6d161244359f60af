"""A stop matcher's outcome is that of cutting the whole text at the earliest stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.errors import InvalidRequest
from gapless.text.stop import StopMatcher, StopResult


def run(stops: Sequence[str], deltas: Sequence[str], *, include_stop: bool = False) -> StopResult:
    matcher = StopMatcher(stops, include_stop=include_stop)
    results = [*(matcher.push(delta) for delta in deltas), matcher.finish()]
    return StopResult("".join(result.text for result in results), results[-1].stop)


def cut(stops: Sequence[str], text: str, *, include_stop: bool) -> StopResult:
    """The definition, on the whole text."""
    for start in range(len(text)):
        matching = [stop for stop in stops if text.startswith(stop, start)]
        if matching:
            stop = max(matching, key=len)
            return StopResult(text[: start + len(stop) if include_stop else start], stop)
    return StopResult(text)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    deltas=st.lists(st.text("abc", max_size=4), max_size=10),
    include_stop=st.booleans(),
)
@settings(max_examples=1000, deadline=None)
def test_outcome_does_not_depend_on_the_deltas(stops: list[str], deltas: list[str], include_stop: bool) -> None:
    assert run(stops, deltas, include_stop=include_stop) == cut(stops, "".join(deltas), include_stop=include_stop)


@given(stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1), deltas=st.lists(st.text("abc", max_size=4)))
def test_holds_back_only_what_may_begin_a_stop(stops: list[str], deltas: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = shown = ""
    for delta in deltas:
        text += delta
        result = matcher.push(delta)
        shown += result.text
        if result.stopped:
            return
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_text_before_a_possible_stop_is_shown_at_once() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.push("hello <") == StopResult("hello ")
    assert matcher.push("b>") == StopResult("<b>")
    assert matcher.push("x</end>y") == StopResult("x", "</end>")
    assert matcher.push("more") == StopResult("", "</end>")
    assert matcher.finish().stopped


def test_an_earlier_stop_that_is_still_open_wins() -> None:
    matcher = StopMatcher(["abc", "b"])
    assert matcher.push("ab") == StopResult("")
    assert matcher.push("c") == StopResult("", "abc")


def test_the_longest_of_equal_starts_wins() -> None:
    assert run(["\n", "\n\n"], ["a\n", "\nb"], include_stop=True) == StopResult("a\n\n", "\n\n")
    assert run(["\n", "\n\n"], ["a\n"]) == StopResult("a", "\n")


def test_no_stops_passes_everything() -> None:
    assert run([], ["a", "b"]) == StopResult("ab")


@pytest.mark.parametrize("stop", ["", None, 3])
def test_refuses_what_is_not_a_stop_string(stop: object) -> None:
    with pytest.raises(InvalidRequest, match="non-empty string"):
        StopMatcher([stop])  # type: ignore[list-item]
