"""A stop matcher's outcome is that of cutting the whole text at the stop string that is complete first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.errors import InvalidRequest
from gapless.text.stop import StopMatcher, StopResult


def run(stops: Sequence[str], deltas: Sequence[str], *, include_stop: bool = False, num_barred: int = 0) -> StopResult:
    """The first `num_barred` deltas may begin a stop, but not complete one."""
    matcher = StopMatcher(stops, include_stop=include_stop)
    results = [matcher.push(delta, may_stop=index >= num_barred) for index, delta in enumerate(deltas)]
    results.append(matcher.finish())
    return StopResult("".join(result.text for result in results), results[-1].stop)


def cut(stops: Sequence[str], text: str, *, include_stop: bool, num_barred: int = 0) -> StopResult:
    """The definition, on the whole text, whose first `num_barred` characters complete no stop."""
    for end in range(num_barred + 1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            stop = max(matching, key=len)
            return StopResult(text[: end if include_stop else end - len(stop)], stop)
    return StopResult(text)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    deltas=st.lists(st.text("abc", max_size=4), max_size=10),
    include_stop=st.booleans(),
    num_barred=st.integers(0, 6),
)
@settings(max_examples=1000, deadline=None)
def test_outcome_does_not_depend_on_the_deltas(
    stops: list[str], deltas: list[str], include_stop: bool, num_barred: int
) -> None:
    barred = len("".join(deltas[:num_barred]))
    found = run(stops, deltas, include_stop=include_stop, num_barred=num_barred)
    assert found == cut(stops, "".join(deltas), include_stop=include_stop, num_barred=barred)


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


def test_the_stop_that_is_complete_first_wins() -> None:
    matcher = StopMatcher(["abc", "b"])
    assert matcher.push("xab") == StopResult("xa", "b")
    assert run(["abc", "b"], ["xabc"]) == run(["abc", "b"], list("xabc")) == StopResult("xa", "b")
    assert run(["\n", "\n\n"], ["a\n", "\nb"], include_stop=True) == StopResult("a\n", "\n")


def test_the_longest_of_equal_ends_wins() -> None:
    assert run(["b", "ab", "xxab"], ["ca", "b"]) == StopResult("c", "ab")


def test_a_stop_that_is_complete_too_early_is_text_and_may_begin_the_next() -> None:
    assert run(["aa"], ["aa", "ab"], num_barred=1) == StopResult("a", "aa")
    assert run(["aa"], ["aa", "ba"], num_barred=1) == StopResult("aaba")


def test_no_stops_passes_everything() -> None:
    assert run([], ["a", "b"]) == StopResult("ab")


@pytest.mark.parametrize("stop", ["", None, 3])
def test_refuses_what_is_not_a_stop_string(stop: object) -> None:
    with pytest.raises(InvalidRequest, match="non-empty string"):
        StopMatcher([stop])  # type: ignore[list-item]
