"""Cleaning a stream gives the cleaned text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.text.cleanup import CleanUpStream, clean_up


@given(deltas=st.lists(st.text(" .?!,'ntmsver", max_size=6), max_size=12))
@settings(max_examples=2000, deadline=None)
def test_stream_equals_whole(deltas: list[str]) -> None:
    stream = CleanUpStream()
    assert "".join(stream.push(delta) for delta in deltas) + stream.finish() == clean_up("".join(deltas))


def test_words_are_shown_as_they_come() -> None:
    stream = CleanUpStream()
    assert [stream.push(word) for word in ("it", " is", " so", " .", " Good")] == ["", "it", " is", " so", ". Good"]
