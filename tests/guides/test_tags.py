"""Structural tags: free text, and what stands between a tag's begin and its end."""

from __future__ import annotations

import re
from typing import Any

import pytest
from wanderers import accepts, guide_for

from gapless.errors import InvalidRequest
from gapless.guides.vocabulary import Vocabulary
from gapless.text.tokenizer import Tokenizer

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TAGS = [
    {"begin": "<f=a>", "content": NUMBER, "end": "</f>"},
    {"begin": "<f=b>", "content": {"type": "regex", "pattern": "[xy]+"}, "end": "</f>"},
]
CALL = {"begin": "<call>f", "content": NUMBER, "end": "</call>"}


def fits(vocabulary: Vocabulary, tokenizer: Tokenizer, text: str, tags: dict[str, Any]) -> bool:
    return accepts(guide_for(vocabulary, structural_tag=tags), tokenizer.encode(text))


def triggered(tags: list[Any] = TAGS, triggers: tuple[str, ...] = ("<f=",), **more: bool) -> dict[str, Any]:
    return {"format": {"type": "triggered_tags", "triggers": list(triggers), "tags": tags, **more}}


@pytest.mark.parametrize(
    ("text", "free", "begins", "once", "one"),
    [
        ("no tag", True, False, True, False),
        ("see <f=a>12</f> then", True, False, False, False),
        ("see <f=a>12</f>", True, False, True, False),
        ("<f=b>xyx</f>", True, True, True, True),
        ("<f=b>x</f> and <f=a>-3</f>", True, True, False, False),
        ("<f=c>", False, False, False, False),
        ("<f=a>x</f>", False, False, False, False),
        ("<f=b>x", False, False, False, False),
        ("<f", True, False, True, False),
    ],
)
def test_triggered_tags(
    tokenizer: Tokenizer, vocabulary: Vocabulary, text: str, free: bool, begins: bool, once: bool, one: bool
) -> None:
    for expected, more in (
        (free, {}),
        (begins, {"at_least_one": True}),
        (once, {"stop_after_first": True}),
        (one, {"at_least_one": True, "stop_after_first": True}),
    ):
        assert fits(vocabulary, tokenizer, text, triggered(**more)) == expected, more


def test_the_older_spelling(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    tags = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}],
        "triggers": ["<f"],
    }
    assert fits(vocabulary, tokenizer, "a <f>true</f> b <f>false</f>", tags)
    assert not fits(vocabulary, tokenizer, "a <f>1</f>", tags)


def test_special_tokens_are_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    tags = triggered([CALL], ("<call>",))
    assert fits(vocabulary, tokenizer, "text<call>f12</call> more", tags)
    assert not fits(vocabulary, tokenizer, "text<call>g12</call>", tags)
    assert not fits(vocabulary, tokenizer, "text</call>", tags)
    spelled = [token for char in "<call>f1</call>" for token in tokenizer.encode(char)]
    assert accepts(guide_for(vocabulary, structural_tag=tags), spelled), "its letters are free text"


def test_thoughts_then_a_shape(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    thought = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
    tags = {"format": {"type": "sequence", "elements": [thought, NUMBER]}}
    assert fits(vocabulary, tokenizer, "<think>a < b\n</think>12", tags)
    assert not fits(vocabulary, tokenizer, "<think>12", tags)
    assert not fits(vocabulary, tokenizer, "<think>a</think>b", tags)


def test_tags_with_separators(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    content = {"type": "or", "elements": [{"type": "const_string", "value": "a"}, {"type": "grammar", "grammar": GBNF}]}
    one = {"type": "tags_with_separator", "separator": ", ", "tags": [{"begin": "[", "content": content, "end": "]"}]}
    some = one | {"at_least_one": True}
    for text, any_number, at_least_one, only_one in (
        ("", True, False, True),
        ("[a]", True, True, True),
        ("[a], [qqq]", True, True, False),
        ("[a],[q]", False, False, False),
        ("[b]", False, False, False),
    ):
        assert fits(vocabulary, tokenizer, text, {"format": one}) == any_number
        assert fits(vocabulary, tokenizer, text, {"format": some}) == at_least_one
        assert fits(vocabulary, tokenizer, text, {"format": one | {"stop_after_first": True}}) == only_one


GBNF = 'start: "q"+'


@pytest.mark.parametrize(
    ("tags", "reason"),
    [
        ({"x": 1}, "neither 'format' nor 'structures'"),
        ({"format": {"type": "strange"}}, "unknown format 'strange'"),
        ({"format": "text"}, "must be an object"),
        ({"format": {"type": "tag", "begin": "a", "content": NUMBER}}, "end must be text"),
        (triggered([{"begin": "<g>", "content": NUMBER, "end": ""}]), "none of the triggers"),
        (triggered([]), "tags must be a list"),
        (triggered([CALL], ("x<call>",)), "special token after other text"),
        (triggered(at_least_one=3), "at_least_one must be true or false"),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, NUMBER]}}, "any_text can stand"),
        ({"format": {"type": "json_schema", "json_schema": "x"}}, "needs 'json_schema'"),
        ({"structures": [1], "triggers": ["a"]}, "structures.0 is no object"),
        ({"format": {"type": "regex", "pattern": "("}}, "unclosed group"),
    ],
)
def test_bad_tags_are_refused_with_the_reason(vocabulary: Vocabulary, tags: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(reason)):
        guide_for(vocabulary, structural_tag=tags)
