"""The deltas of a detokenizer add up to the text, whatever the ids and however they arrive."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.text.detokenizer import Detokenizer
from gapless.text.tokenizer import Tokenizer


def deltas(tokenizer: Tokenizer, pushes: Sequence[Sequence[int]], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(ids) for ids in pushes), detokenizer.finish()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[int]:
    """Any id, some outside the vocabulary; the low ones (special and byte tokens) as often as the rest."""
    return st.integers(0, min(270, tokenizer.vocab_size)) | st.integers(0, tokenizer.vocab_size + 3)


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=400, deadline=None)
def test_deltas_add_up(small_tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    pushes = data.draw(st.lists(st.lists(ids_of(small_tokenizer), max_size=4), max_size=20))
    whole = small_tokenizer.decode([id for ids in pushes for id in ids], skip_special_tokens=skip)
    assert "".join(deltas(small_tokenizer, pushes, skip=skip)) == whole


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_deltas_add_up_for_smollm2(smollm2: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(ids_of(smollm2), max_size=40))
    assert "".join(deltas(smollm2, [[id] for id in ids])) == smollm2.decode(ids)


@given(text=st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_no_half_characters(small_tokenizer: Tokenizer, text: str) -> None:
    ids = small_tokenizer.encode(text, add_special_tokens=False)
    shown = "".join(deltas(small_tokenizer, [[id] for id in ids]))
    assert shown.count("\ufffd") == small_tokenizer.decode(ids).count("\ufffd")


def test_every_byte_level_token_has_its_bytes(smollm2: Tokenizer) -> None:
    for id in range(smollm2.vocab_size):
        assert smollm2.byte_pieces[id].decode("utf-8", "replace") == smollm2.decode([id], skip_special_tokens=False)


def test_a_character_appears_with_its_last_byte(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("😀!")
    assert deltas(byte_level, [[id] for id in ids]) == ["", "", "", "😀", "!", ""]


def test_bytes_that_never_complete_do_not_hold_back_what_follows(byte_level: Tokenizer) -> None:
    half = byte_level.encode("😀")[:2]
    exclamation = byte_level.encode("!")
    assert deltas(byte_level, [half, exclamation, half]) == ["", "\ufffd!", "", "\ufffd"]


def test_a_replacement_character_of_the_model_is_shown_at_once(byte_level: Tokenizer) -> None:
    shown = deltas(byte_level, [byte_level.encode("\ufffd")] * 3)
    assert shown == ["\ufffd", "\ufffd", "\ufffd", ""]


def test_a_replacement_token_is_not_held_for_ever(sentencepiece: Tokenizer) -> None:
    token = sentencepiece.token_to_id("\ufffd")
    assert token is not None
    detokenizer = Detokenizer(sentencepiece)
    num_shown = 0
    for num_pushed in range(1, 50):
        num_shown += len(detokenizer.push([token]))
        assert num_pushed - num_shown < 4


def test_a_run_of_byte_tokens_waits_for_its_end(sentencepiece: Tokenizer) -> None:
    euro = [sentencepiece.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    the = sentencepiece.token_to_id("▁the")
    assert deltas(sentencepiece, [[id] for id in [the, *euro, the]]) == ["the", "", "", "", "€ the", ""]


def test_a_special_token_between_two_halves_of_a_character(byte_level: Tokenizer) -> None:
    first, *rest = byte_level.encode("😀")
    assert "".join(deltas(byte_level, [[first], [0], rest])) == "😀"
    assert "".join(deltas(byte_level, [[first], [0], rest], skip=False)) == byte_level.decode(
        [first, 0, *rest], skip_special_tokens=False
    )


def test_cost_is_linear(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("the cat sat é on the mat " * 100)

    def seconds(repeat: int) -> float:
        detokenizer = Detokenizer(sentencepiece)
        begin = time.perf_counter()
        for id in ids * repeat:
            detokenizer.push([id])
        return time.perf_counter() - begin

    seconds(1)
    assert seconds(8) < 40 * seconds(1)
