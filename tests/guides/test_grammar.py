"""Grammars of every kind: what they allow, where they end, and what they refuse."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from wanderers import accepts, allowed, guide_for, wander

from gapless.core.structured import read_structured
from gapless.errors import InvalidRequest
from gapless.guides.grammar import Grammar
from gapless.guides.vocabulary import Vocabulary
from gapless.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(5))
def test_random_texts_have_the_shape(tokenizer: Tokenizer, vocabulary: Vocabulary, seed: int) -> None:
    def text(**spec: Any) -> str:
        found = wander(guide_for(vocabulary, **spec), vocabulary, tokenizer, seed)
        assert found is not None
        return found

    person = json.loads(text(json_schema=PERSON))
    assert list(person) == ["name", "age"]
    assert 0 <= person["age"] <= 99
    assert re.fullmatch(r"[a-f]{2,4}-\d{3}", text(regex=r"[a-f]{2,4}-\d{3}"), re.ASCII)
    assert text(choice=["yes", "no", 'a "quoted" é\n']) in ("yes", "no", 'a "quoted" é\n')
    assert re.fullmatch("(ab|c)+!", text(grammar='start: (A | "c")+ "!"\nA: "ab"'))
    assert text(grammar='root ::= "x" [0-9] "y"')[::2] == "xy"
    assert isinstance(json.loads(text(json_schema=json.dumps({"enum": [1, [2], {"a": None}]}))), int | list | dict)


def test_any_object(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    guide = guide_for(vocabulary, json_object=True)
    assert allowed(guide, vocabulary) == tokenizer.encode("{")
    assert accepts(guide, tokenizer.encode('{"a": [1, {"b": null}]}'))


def test_white_space_is_bounded(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    def fits(text: str, **options: Any) -> bool:
        return accepts(guide_for(vocabulary, json_schema={"type": "array"}, **options), tokenizer.encode(text))

    assert fits("[1, 2]")
    assert fits("[\n  1,\n  2\n]")
    assert not fits("[  1]")
    assert not fits("[\n\n1]")
    assert fits("[1,2]", disable_any_whitespace=True)
    assert not fits("[1, 2]", disable_any_whitespace=True)
    assert fits("[   1]", whitespace_pattern=" *")


def test_a_space_may_be_demanded(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    guide = guide_for(vocabulary, json_schema={"type": "array", "items": {"const": 1}}, whitespace_pattern=" ")
    guide.advance(np.array(tokenizer.encode("[ 1 , 1"), np.int32))
    with pytest.raises(InvalidRequest):
        guide.advance(np.array(tokenizer.encode("\n"), np.int32))


def test_a_guide_is_over_when_only_the_end_can_come(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    guide = guide_for(vocabulary, choice=["ab"])
    assert not guide.is_over
    guide.advance(np.array(tokenizer.encode("a"), np.int32))
    assert not guide.is_over
    guide.advance(np.array(tokenizer.encode("b"), np.int32))
    assert guide.is_over


def test_guides_of_one_grammar_do_not_share_their_place(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    grammar = Grammar(read_structured({"regex": "abc"}), vocabulary)
    first, second = grammar.guide(), grammar.guide()
    first.advance(np.array(tokenizer.encode("ab"), np.int32))
    assert allowed(first, vocabulary) == tokenizer.encode("c")
    assert allowed(second, vocabulary) == tokenizer.encode("a")


def test_a_mask_may_be_shorter_than_the_vocabulary(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """A tokenizer may have more tokens than the model."""
    mask = np.zeros(8, np.int32)
    guide_for(vocabulary, regex="a|<").fill(mask)
    bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert sorted(bits.tolist()) == sorted(tokenizer.encode("a<"))


def test_a_token_that_was_not_allowed_is_an_error(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    with pytest.raises(InvalidRequest, match="regex cannot be used"):
        guide_for(vocabulary, regex="abc").advance(np.array(tokenizer.encode("x"), np.int32))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"json_schema": {"type": "strin"}}, "Invalid type: strin"),
        ({"json_schema": {"uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": {"not": {}}}, "not"),
        ({"json_schema": {"$ref": "http://example.com/schema"}}, "example.com"),
        ({"json_schema": {"$ref": "#"}}, "no text has this shape"),
        ({"json_schema": {"type": "string", "minLength": 3, "maxLength": 2}}, "Unsatisfiable"),
        ({"grammar": "start: missing"}, "missing"),
        ({"grammar": 'begin: "a"'}, "start"),
        ({"grammar": 'root ::= "a'}, "GBNF"),
        ({"grammar": "start: A\nA: " + " & ".join(f"/.*w{i}.*/" for i in range(30))}, "intersections"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(
    vocabulary: Vocabulary, spec: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(reason)) as caught:
        guide_for(vocabulary, **spec)
    assert caught.value.param == "structured"
    assert str(caught.value).startswith(f"structured: this {next(iter(spec))} cannot be used: ")
    assert "regex" not in spec or "start:" not in str(caught.value), "the client wrote a regex and no Lark"
