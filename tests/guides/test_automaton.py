"""Automata: their masks are llguidance's, for every shape that has a program."""

from __future__ import annotations

import contextlib
import gc
import json
import random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from wanderers import accepts, allowed, wander

from gapless.core.structured import Structured, read_structured
from gapless.errors import InvalidRequest
from gapless.guides.automaton import Automaton, automaton_of
from gapless.guides.compiler import Compiler
from gapless.guides.grammar import Grammar
from gapless.guides.masks import advance_together, fill_masks
from gapless.guides.vocabulary import Vocabulary
from gapless.text.tokenizer import Tokenizer

WORDS = ["red", "green", "reddish"]
NAME = {"type": "string", "maxLength": 9}


def record(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


PERSON = record(["id", "name"], id={"type": "integer", "minimum": 17, "maximum": 4213}, name=NAME, tags={"enum": WORDS})
SCHEMAS: dict[str, Any] = {
    "string": {"type": "string"},
    "short string": {"type": "string", "minLength": 3, "maxLength": 7},
    "long string": {"type": "string", "minLength": 5},
    "number": {"type": "number"},
    "integer": {"type": "integer"},
    "range": {"type": "integer", "minimum": 95, "exclusiveMaximum": 1203},
    "least": {"type": "integer", "exclusiveMinimum": 8},
    "one number": {"type": "integer", "minimum": 0, "maximum": 0},
    "several types": {"type": ["string", "null", "number"]},
    "any of": {"anyOf": [{"type": "integer"}, NAME, {"type": "boolean"}]},
    "constants": {"enum": ['a"b', "é", "x/y", 3, None, True, "ab"]},
    "record": PERSON,
    "optional first": record(["c"], a=NAME, b={"type": "null"}, c={"type": "boolean"}, d={"type": "integer"}),
    "all optional": record([], a={"type": "null"}, b={"type": "boolean"}),
    "no properties": record([]),
    "array": {"type": "array", "items": NAME},
    "bounded array": {"type": "array", "items": {"enum": [1, 12]}, "minItems": 2, "maxItems": 4},
    "empty array": {"type": "array", "items": NAME, "maxItems": 0},
    "counted array": {"type": "array", "items": {"type": "array", "items": NAME, "minItems": 1}, "minItems": 6},
    "counted records": {"type": "array", "items": PERSON, "minItems": 30},
    "references": {"$defs": {"p": PERSON}, **record(["a"], a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"})},
    "narrow range": {"type": "integer", "minimum": 5, "exclusiveMaximum": 7},
    "empty string": {"type": "string", "maxLength": 0},
    "long counted array": {"type": "array", "items": {"enum": [1]}, "minItems": 60},
    "notes": {"title": "t", "type": "string", "description": "d", "maxLength": 2},
}
WITHOUT: dict[str, Any] = {
    "further properties": {"type": "object", "properties": {"a": NAME}},
    "pattern": {"type": "string", "pattern": "a+"},
    "recursion": {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"},
    "negative numbers": {"type": "integer", "minimum": -3},
    "control character": {"const": "a\nb"},
    "fraction": {"enum": [1.0]},
    "other type": {"type": "integer", "enum": ["a"]},
    "nothing fits": {"type": "integer", "minimum": 3, "maximum": 2},
    "long strings": {"type": "string", "maxLength": 5000},
    "many items": {"type": "array", "items": PERSON, "minItems": 100, "maxItems": 400},
    "unknown": {"type": "string", "format": "date"},
    "required without a schema": record(["z"], a=NAME),
    "any value": True,
}


REGEXES = (
    *(r"\d{4}-\d{2}-\d{2}", r"(yes|no|maybe)( please)?", r"[A-Z][a-z]+( [A-Z][a-z]+)*", r"#[0-9a-fA-F]{6}", r".{3,40}"),
    *(
        r"[\w.+-]+@[\w-]+\.(com|org)",
        r"((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}\d{1,3}",
        r"[^,\n]*,[^,\n]*",
        r"(a|b)*a(a|b){3}",
    ),
    *(r"(a*)*b", r"(x+x+)+y", "[α-ω]{2,5}é?", r"[^\x00-\x7f]{1,6}", r"\S+\s\S+", r"a.*b.*c", r"(\w+ ){2,5}\w+\."),
    *(
        r"-?(0|[1-9]\d*)(\.\d+)?",
        r"^(foo|bar)$",
        r"^a|b$",
        r"[a-z]{5,}[0-9]?",
        "日本{2,3}",
        "[日本語]{4,9}x",
        r"\W\D\S",
    ),
    *(
        r"a*?b",
        r"(|a)b",
        r"x{2}{3}",
        r"a++",
        r"[]a]",
        r"[^]a-]",
        r"[a\]\w-]+",
        r"\x41\u0042\x{43}\U00000044",
        r"(?P<n>a)(?:b)(?<m>c)",
    ),
    *(r"\n\t\.\-\/\_\ ", r"()", r"a|", r"[\n\d]", r"[a&b~c]", r"a}b]", r"(\w|,){4}", r"[a-z]{4,6}ing"),
)
NOT_OURS = (
    *(
        r"a^b",
        r"a$b",
        r"(?i)ab",
        r"(?s).",
        r"\bfoo",
        r"\Aab\z",
        r"\p{L}",
        r"[[:alpha:]]",
        r"[a-z&&b]",
        r"[a-z--b]",
        r"[a~~b]",
    ),
    *(
        r"[a-c-e]",
        r"\<",
        r"a{9999}",
        r"(abcdefgh[a-z]){500}",
        r"(",
        r"[b-a]",
        r"a{3,2}",
        r"a{,3}",
        r"\1",
        r"(?=a)b",
        "\\",
        "[",
        "*a",
    ),
)


def both(vocabulary: Vocabulary, **spec: Any) -> tuple[Automaton, Grammar]:
    structured = read_structured(spec)
    found = automaton_of(structured, vocabulary.bytes, vocabulary.num_words)
    assert found is not None
    return found, Grammar(structured, vocabulary)


def compare(automaton: Automaton, grammar: Grammar, vocabulary: Vocabulary, seed: int, most: int = 60) -> None:
    """Along a random text. Where one text alone can come, llguidance may allow one way to write it in tokens."""
    mine, theirs, rng = automaton.guide(), grammar.guide(), np.random.default_rng(seed)
    for _ in range(most):
        assert mine.is_over == theirs.is_over
        if mine.is_over:
            return
        found, expected = allowed(mine, vocabulary), allowed(theirs, vocabulary)
        assert found == expected or (len(expected) == 1 and expected[0] in found)
        token = rng.choice(expected, 1).astype(np.int32)
        mine.advance(token)
        theirs.advance(token)


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_masks_of_schemas(vocabulary: Vocabulary, smollm2: Tokenizer, schema: Any, words: Vocabulary) -> None:
    compare(*both(vocabulary, json_schema=schema), vocabulary, seed=1)
    automaton, grammar = both(words, json_schema=schema)
    for seed in range(2):
        compare(automaton, grammar, words, seed)
    compare(*both(words, json_schema=schema, disable_any_whitespace=True), words, seed=5)


@pytest.mark.parametrize("regex", REGEXES)
def test_masks_of_regexes(vocabulary: Vocabulary, words: Vocabulary, regex: str) -> None:
    automaton, grammar = both(vocabulary, regex=regex)
    for seed in range(3):
        compare(automaton, grammar, vocabulary, seed, most=25)
    compare(*both(words, regex=regex), words, seed=3, most=10)


@pytest.mark.parametrize("regex", NOT_OURS)
def test_regexes_without_an_automaton(vocabulary: Vocabulary, regex: str) -> None:
    assert automaton_of(Structured("regex", regex), vocabulary.bytes, vocabulary.num_words) is None


def test_characters_of_a_word_are_those_of_llguidance(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    """All characters with two bytes, and a sample of the others."""
    automaton, grammar = both(vocabulary, regex=r"\w")
    rng = random.Random(1)
    for code in [
        *range(0x80, 0x800),
        *rng.sample(range(0x800, 0xD800), 400),
        *rng.sample(range(0x10000, 0x11FFF), 400),
    ]:
        mine, tokens = automaton.guide(), tokenizer.encode(chr(code))
        with contextlib.suppress(InvalidRequest):
            mine.advance(np.array(tokens, np.int32))
        assert mine.is_over == accepts(grammar.guide(), tokens), hex(code)


def test_tables_of_letters_are_made_on_a_thread(tokenizer: Tokenizer) -> None:
    """They take milliseconds, so that a caller makes none; it uses those that are there."""
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, [256])
    shape = read_structured({"regex": "[a-w]{3,30}x"})
    assert automaton_of(shape, vocabulary.bytes, vocabulary.num_words, at_once=True) is None
    assert automaton_of(shape, vocabulary.bytes, vocabulary.num_words) is not None
    assert automaton_of(shape, vocabulary.bytes, vocabulary.num_words, at_once=True) is not None


def test_masks_of_choices(vocabulary: Vocabulary, words: Vocabulary) -> None:
    choice = ["yes", "no", "yes please", "nö", 'a"\n']
    for some in (vocabulary, words):
        compare(*both(some, choice=choice), some, seed=3)


def test_an_automaton_gives_its_memory_back(words: Vocabulary) -> None:
    assert words.bytes is not None
    gc.collect()
    before = words.bytes.num_state_bytes
    automaton, _ = both(words, json_schema=PERSON)
    allowed(automaton.guide(), words)
    assert words.bytes.num_state_bytes - before == automaton.num_bytes > 0
    del automaton
    assert words.bytes.num_state_bytes == before


@pytest.mark.parametrize("schema", WITHOUT.values(), ids=WITHOUT)
def test_shapes_without_an_automaton(vocabulary: Vocabulary, schema: Any) -> None:
    assert automaton_of(read_structured({"json_schema": schema}), vocabulary.bytes, vocabulary.num_words) is None


def test_other_kinds_have_no_automaton(vocabulary: Vocabulary) -> None:
    for spec in ({"json_object": True}, {"json_schema": NAME, "whitespace_pattern": " *"}):
        assert automaton_of(read_structured(spec), vocabulary.bytes, vocabulary.num_words) is None


def draw(rng: random.Random, depth: int = 0) -> Any:
    """A random schema that has a program."""
    kind = rng.choice(["string", "integer", "enum", "null", "number"] + ["object", "array", "any"] * (depth < 3))
    low, more = rng.randrange(4), rng.randrange(30)
    match kind:
        case "string":
            return rng.choice([{"type": "string"}, {"type": "string", "minLength": low, "maxLength": low + more}])
        case "integer":
            return {"type": "integer", "minimum": low * 37, "maximum": low * 37 + more * rng.choice([1, 999])}
        case "enum":
            return {"enum": rng.sample(["a", "b c", "ü", 7, None, False], 1 + low)}
        case "object":
            names = rng.sample(["a", "b", "ab", "ü"], low)
            return record([name for name in names if rng.random() < 0.5], **{n: draw(rng, depth + 1) for n in names})
        case "array":
            most = {} if rng.random() < 0.5 else {"maxItems": low + rng.randrange(3)}
            return {"type": "array", "items": draw(rng, depth + 1), "minItems": low, **most}
        case "any":
            return {"anyOf": [draw(rng, depth + 1) for _ in range(1 + low)]}
        case _:
            return {"type": kind}


@pytest.mark.parametrize("seed", range(30))
def test_random_schemas(vocabulary: Vocabulary, tokenizer: Tokenizer, seed: int) -> None:
    schema = draw(random.Random(seed))
    automaton, grammar = both(vocabulary, json_schema=schema)
    compare(automaton, grammar, vocabulary, seed, most=25)
    text = wander(automaton.guide(), vocabulary, tokenizer, seed)
    if text is not None:
        Draft202012Validator(schema).validate(json.loads(text.removesuffix("<end>").removesuffix("<over>")))


def test_many_at_once(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    """Guides of automata and of grammars side by side; one that is given a wrong token fails alone."""
    automaton, grammar = both(vocabulary, choice=["ab", "ac", "b"])
    guides = [(automaton if number % 3 else grammar).guide() for number in range(20)]
    tokens = [tokenizer.encode("x" if number == 7 else "a" if number % 2 else "b")[0] for number in range(20)]
    errors = advance_together(guides, tokens)
    assert list(errors) == [7]
    assert isinstance(errors[7], InvalidRequest)
    assert [guide.is_over for guide in guides] == [number % 2 == 0 for number in range(20)]
    going = [guide for number, guide in enumerate(guides) if number % 2 and number != 7]
    masks = np.full((len(going), vocabulary.num_words), -1, np.int32)
    assert not fill_masks(going, masks).errors
    for guide, mask in zip(going, masks, strict=True):
        alone = np.zeros_like(mask)
        guide.fill(alone)
        np.testing.assert_array_equal(mask, alone)
    assert allowed(going[0], vocabulary) == sorted(tokenizer.encode("bc"))


def test_an_end_ends_it(vocabulary: Vocabulary) -> None:
    automaton, _ = both(vocabulary, json_schema={"type": "integer"})
    guide = automaton.guide()
    with pytest.raises(InvalidRequest, match="does not fit"):
        guide.advance(np.array([256], np.int32))
    guide.advance(np.array([ord("7") - 33], np.int32))  # its place in the alphabet of bytes
    assert not guide.is_over
    guide.advance(np.array([257], np.int32))
    assert guide.is_over


def test_masks_narrower_than_the_tokenizer(vocabulary: Vocabulary) -> None:
    automaton, _ = both(vocabulary, choice=["ab"])
    whole, part = np.zeros(vocabulary.num_words, np.int32), np.zeros(vocabulary.num_words - 1, np.int32)
    automaton.guide().fill(whole)
    assert not fill_masks([automaton.guide()], part[None]).errors
    np.testing.assert_array_equal(part, whole[:-1])


def test_a_shape_with_too_many_states_is_refused_and_made_anew(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    """Each byte of these texts has a state, and there are more than there may be: the first texts come to their end."""
    rng = random.Random(1)
    texts = ["".join(rng.choices("abcdefgh", k=90)) for _ in range(200)]
    tokens = [np.array(tokenizer.encode(text), np.int32) for text in texts]
    structured = read_structured({"choice": texts})
    compiler = Compiler(lambda: vocabulary)
    automaton = compiler.start(structured).result(30)
    assert isinstance(automaton, Automaton)
    for each in tokens[:150]:
        guide = automaton.guide()
        guide.advance(each)
        assert guide.is_over
    assert compiler.start(structured).result(30) is automaton
    last = [(automaton.guide(), each) for each in tokens[150:]]
    with pytest.raises(InvalidRequest, match="too complex"):
        _ = [guide.advance(each) for guide, each in last]
    with pytest.raises(InvalidRequest, match="too complex"):
        automaton.guide().fill(np.zeros(vocabulary.num_words, np.int32))
    anew = compiler.start(structured).result(30)
    compiler.close()
    assert anew is not automaton
    guide = anew.guide()
    guide.advance(tokens[-1])
    assert guide.is_over


def test_the_compiler_prefers_automata(vocabulary: Vocabulary) -> None:
    compiler = Compiler(lambda: vocabulary)
    kinds = [
        {"choice": ["a"]},
        {"json_schema": PERSON},
        {"regex": "a"},
        {"regex": "(?i)a"},
        {"json_schema": WITHOUT["pattern"]},
    ]
    found = [type(compiler.start(read_structured(spec)).result(30)).__name__ for spec in kinds]
    compiler.close()
    assert found == ["Automaton"] * 3 + ["Grammar"] * 2


@pytest.mark.parametrize("text", ['"\ud7ff', '"\u07ff', '"\uffff', '"\U0010ffff', '"\\u000a', '"\\u001F', '"\\u007f'])
def test_masks_within_a_letter(vocabulary: Vocabulary, tokenizer: Tokenizer, text: str) -> None:
    """After each token of a text, of which some hold a part of a letter only."""
    automaton, grammar = both(vocabulary, json_schema={"type": "string"})
    mine, theirs = automaton.guide(), grammar.guide()
    for token in tokenizer.encode(text):
        found = allowed(mine, vocabulary)
        assert found == allowed(theirs, vocabulary)
        if token not in found:
            return
        mine.advance(np.array([token], np.int32))
        theirs.advance(np.array([token], np.int32))
    assert allowed(mine, vocabulary) == allowed(theirs, vocabulary)


def test_a_letter_is_refused_where_none_may_come(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    """Also if the token that brings it was never allowed."""
    guide = both(vocabulary, json_schema={"type": "string", "maxLength": 0})[0].guide()
    guide.advance(np.array(tokenizer.encode('"'), np.int32))
    with pytest.raises(InvalidRequest):
        guide.advance(np.array(tokenizer.encode("a"), np.int32))
