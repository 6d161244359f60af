"""Bad words become what the tokenizer makes of them, at the begin of a text and after a space."""

from __future__ import annotations

import pytest

from gapless.errors import InvalidRequest
from gapless.text.bad_words import in_tokens


class Words:
    """A tokenizer of known texts."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return {"cat": [1], " cat": [2], "dogs": [3, 4], " dogs": [5, 4], "bird": [6], " bird": [7, 8]}[text]


def test_a_word_is_spelled_with_and_without_a_space() -> None:
    tokenizer = Words()
    assert in_tokens(("cat", " cat"), tokenizer) == ((1,), (2,))  # type: ignore[arg-type]
    assert in_tokens(("dogs", (9, 9)), tokenizer) == ((3, 4), (5, 4), (9, 9))  # type: ignore[arg-type]
    assert in_tokens(("bird",), tokenizer) == ((6,),)  # type: ignore[arg-type]  # a space is a token of its own there


def test_without_a_tokenizer_only_token_ids_are_words() -> None:
    assert in_tokens(((5, 6),), None) == ((5, 6),)
    with pytest.raises(InvalidRequest, match="bad_words need a tokenizer"):
        in_tokens(("cat",), None)
