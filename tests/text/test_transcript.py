"""A transcript's text and its token starts do not depend on how tokens are grouped, stop strings wait for min_tokens,
and the text has the stop only if it is asked for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.text.tokenizer import Tokenizer
from gapless.text.transcript import NOTHING, Transcript


def assemble(transcript: Transcript, pushes: list[list[int]]) -> str:
    """All of the text, added in pieces; the last piece ends it."""
    added = [*(transcript.take(ids) for ids in pushes), transcript.take((), "length")]
    assert [token for piece in added for token in piece.token_ids] == transcript.token_ids
    return "".join(piece.text for piece in added)


def expected(tokenizer: Tokenizer, ids: list[int], stops: list[str], min_tokens: int, *, include: bool) -> str:
    """The definition: the first prefix of tokens, longer than min_tokens, with a stop string that ends in its last
    token's text. Of several, the one that ends first; of those, the longest."""
    whole = tokenizer.decode(ids)
    before = len(tokenizer.decode(ids[:min_tokens]))
    for end in range(before + 1, len(whole) + 1):
        matching = [stop for stop in stops if whole[:end].endswith(stop)]
        if matching:
            return whole[: end if include else end - max(map(len, matching))]
    return whole


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_min_tokens_hold_stop_strings_back(byte_level: Tokenizer, data: st.DataObject) -> None:
    ids = byte_level.encode(data.draw(st.text("ab c", max_size=12)), add_special_tokens=False)
    stops = data.draw(st.lists(st.text("ab ", min_size=1, max_size=3), max_size=3))
    min_tokens = data.draw(st.integers(0, 8))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    pushes = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    include = data.draw(st.booleans())
    transcript = Transcript(byte_level, stops, min_tokens=min_tokens, include_stop=include)
    found = assemble(transcript, pushes)
    assert found == transcript.text == expected(byte_level, ids, stops, min_tokens, include=include)
    assert transcript.num_shown == len(found)
    assert transcript.finish_reason == ("length" if transcript.stop is None else "stop")


def test_a_stop_string_counts_from_the_token_after_the_last_of_min_tokens(byte_level: Tokenizer) -> None:
    ids = [byte_level.encode(character)[0] for character in "xabab"]
    for min_tokens, text in ((0, "x"), (2, "x"), (3, "xab"), (4, "xab"), (5, "xabab")):
        transcript = Transcript(byte_level, ["ab"], min_tokens=min_tokens)
        assert assemble(transcript, [ids]) == text, min_tokens
        assert transcript.stop == (None if min_tokens == 5 else "ab")


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_the_text_of_a_stop_token_is_shown_only_if_asked_for(byte_level: Tokenizer, data: st.DataObject) -> None:
    """A special one has no text. The stop token arrives before the news that it was the last."""
    special = min(byte_level.special_ids)
    (plain,) = byte_level.encode("!", add_special_tokens=False)
    body = byte_level.encode(data.draw(st.text("ab é", max_size=6)), add_special_tokens=False)
    last, include = data.draw(st.sampled_from([plain, special])), data.draw(st.booleans())
    cut = data.draw(st.integers(0, len(body) + 1))
    ids = [*body, last]
    transcript = Transcript(
        byte_level, (), (plain, special), include_stop=include, tells_starts=data.draw(st.booleans())
    )
    shown = transcript.take(ids[:cut]).text + transcript.take(ids[cut:]).text + transcript.take((), "stop").text
    assert shown == transcript.text == byte_level.decode(ids if include else body)
    assert transcript.token_ids == ids
    if transcript.starts:
        assert transcript.num_in_text() == len(body) + (include and last == plain)


def test_a_token_starts_where_its_text_stands(byte_level: Tokenizer) -> None:
    """All tokens of one character start where the character does; a special token takes no room."""
    smiley = byte_level.encode("😀", add_special_tokens=False)
    special = min(byte_level.special_ids)
    (mark,) = byte_level.encode("!", add_special_tokens=False)
    transcript = Transcript(byte_level, tells_starts=True)
    assert assemble(transcript, [[mark, *smiley, special, mark]]) == "!😀!"
    assert transcript.starts == [0, *[1] * len(smiley), 2, 2]


def test_the_first_reason_to_end_stays(byte_level: Tokenizer) -> None:
    ids = [byte_level.encode(character)[0] for character in "xaby"]
    stopped = Transcript(byte_level, ["ab"])
    assert stopped.take(ids[:2]) == ("x", ids[:2])
    assert stopped.finish_reason is None
    assert stopped.take(ids[2:], "length") == ("", ids[2:3])  # what came after the stop string is dropped
    assert stopped.take(ids, "error") == NOTHING
    assert (stopped.text, stopped.token_ids, stopped.finish_reason) == ("x", ids[:3], "stop")
    cut = Transcript(byte_level, ["ab"])
    assert cut.take(ids[:2], "length") == ("xa", ids[:2])  # nothing is held back any more
    assert cut.take(ids[2:]) == NOTHING
    assert (cut.text, cut.stop, cut.finish_reason) == ("xa", None, "length")
