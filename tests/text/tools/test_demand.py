"""What tools demand of a reply, compiled and tried: random texts that the grammar allows have calls that fit."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from gapless.core.structured import read_structured
from gapless.guides.grammar import Grammar, GrammarGuide
from gapless.guides.vocabulary import Vocabulary
from gapless.text.deltas import WholeReply
from gapless.text.parts import TokenizerParts
from gapless.text.reasoning import find_reasoning
from gapless.text.reply import ReplyFormat
from gapless.text.tokenizer import Tokenizer
from gapless.text.tools.base import Tool
from gapless.text.tools.demand import Demand, reply_shape
from gapless.text.tools.find import FORMATS, find_format

POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": -9, "maximum": 9},
        "tag": {"type": "string", "enum": ["a", "b c", "d"]},
        "deep": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["x"],
    "additionalProperties": False,
}
FREE = {"type": "object", "properties": {"q": {"type": "string", "maxLength": 3}}, "additionalProperties": False}
TOOLS = [Tool("point", POINT, strict=True), Tool("free", FREE)]
SPECIAL = ("<end>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|tool_call>", "<tool_call|>", '<|"|>')
THINK = find_reasoning(None, lambda tag: False, "think")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A token for each byte, and tags of formats: some as special tokens, some as other added tokens, as Qwen has."""
    backend = Backend(models.BPE({char: id for id, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.add_tokens(["<tool_call>", "</tool_call>", "<think>"])
    return Tokenizer(TokenizerParts(backend))


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, tokenizer.vocab_size, [256])


def guide(vocabulary: Vocabulary, name: str, demand: Demand | None, **options: Any) -> GrammarGuide:
    shape = reply_shape(find_format(None, name), demand, options.pop("reasoning", None), is_reasoning=False, **options)
    return Grammar(read_structured({"structural_tag": {"format": shape}}), vocabulary).guide()


def wander(guide: GrammarGuide, vocabulary: Vocabulary, tokenizer: Tokenizer, seed: int) -> str | None:
    """A random text of printable ASCII that the guide allows; it ends when it can."""
    rng, tokens = np.random.default_rng(seed), list[int]()
    mask = np.full(vocabulary.num_words, -1, np.int32)
    while not guide.is_over:
        if len(tokens) == 300:
            return None
        guide.fill(mask)
        found = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        found = [int(token) for token in found if token >= 256 or tokenizer.byte_pieces[int(token)].isascii()]
        others = [token for token in found if token != 256]
        tokens.append(256 if 256 in found and (not others or rng.random() < 0.3) else int(rng.choice(others)))
        guide.advance(np.array(tokens[-1:], np.int32))
    return tokenizer.decode([token for token in tokens if token != 256], skip_special_tokens=False)


def parsed(name: str, text: str, *, thinks: bool = False) -> WholeReply:
    format = ReplyFormat(find_format(None, name), THINK if thinks else None)
    parser, reply = format.parser(TOOLS, is_reasoning=False), WholeReply()
    reply.add(parser.push(text))
    reply.add(parser.finish())
    return reply


def check(reply: WholeReply, *, all: bool) -> None:
    for call in reply.calls:
        schema = {"point": POINT, "free": FREE if all else {"type": "object"}}[call.name]
        jsonschema.validate(json.loads(call.arguments), schema)


@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_required_calls_come_and_fit(tokenizer: Tokenizer, vocabulary: Vocabulary, name: str) -> None:
    num_texts = 0
    for seed in range(12):
        is_parallel = seed % 2 == 0
        demand = Demand(TOOLS, is_required=True, is_parallel=is_parallel, enforces_all=True)
        text = wander(guide(vocabulary, name, demand), vocabulary, tokenizer, seed)
        if text is not None:
            reply = parsed(name, text)
            assert reply.calls, text
            assert reply.content.strip() == "", text
            assert is_parallel or len(reply.calls) == 1
            check(reply, all=True)
            num_texts += 1
    assert num_texts > 3


def fits(tokenizer: Tokenizer, guide: GrammarGuide, text: str) -> bool:
    tokens = tokenizer.encode(text)
    return guide.matcher.try_consume_tokens(tokens) == len(tokens) and guide.matcher.is_accepting()


def call_of(name: str, tool: str, *arguments: Any) -> str:
    """A call for each of the arguments."""
    format = find_format(None, name)
    frame = format.frame(tool)
    calls = ["".join([*frame.before, format.spelled(each), *frame.after]) for each in arguments]
    return "".join([*frame.opens, "".join(frame.between).join(calls), *frame.closes])


@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_several_calls_are_allowed_unless_refused(tokenizer: Tokenizer, vocabulary: Vocabulary, name: str) -> None:
    one, two = call_of(name, "point", {"x": 5}), call_of(name, "point", {"x": 5}, {"x": -1})
    assert len(parsed(name, two).calls) == 2
    for is_parallel in (False, True):
        demand = Demand(TOOLS, is_required=True, is_parallel=is_parallel, enforces_all=True)
        assert fits(tokenizer, guide(vocabulary, name, demand), one)
        assert fits(tokenizer, guide(vocabulary, name, demand), two) is is_parallel
        assert not fits(tokenizer, guide(vocabulary, name, demand), "")


@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_a_strict_tool_is_enforced_where_calls_are_free(
    tokenizer: Tokenizer, vocabulary: Vocabulary, name: str
) -> None:
    demand = Demand(TOOLS, is_required=False, is_parallel=True, enforces_all=False)

    def may_say(text: str) -> bool:
        return fits(tokenizer, guide(vocabulary, name, demand), text)

    assert may_say("Just text.")
    assert may_say("")
    assert may_say(call_of(name, "point", {"x": 5}))
    assert not may_say(call_of(name, "point", {"x": 50}))
    assert not may_say(call_of(name, "point", {"y": 5}))
    assert may_say(call_of(name, "free", {"other": 1}))
    assert not may_say(call_of(name, "unknown", {}))


@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_at_most_one_call_where_calls_are_free(tokenizer: Tokenizer, vocabulary: Vocabulary, name: str) -> None:
    demand = Demand(TOOLS, is_required=False, is_parallel=False, enforces_all=False)
    calls = [call_of(name, "point", *[{"x": 5}] * number) for number in (1, 2)]
    assert fits(tokenizer, guide(vocabulary, name, demand), "Text.")
    assert fits(tokenizer, guide(vocabulary, name, demand), calls[0])
    assert not fits(tokenizer, guide(vocabulary, name, demand), calls[1])


@pytest.mark.parametrize("name", ["hermes", "mistral", "json"])
def test_an_answer_may_have_a_shape_and_reasoning_before_it(
    tokenizer: Tokenizer, vocabulary: Vocabulary, name: str
) -> None:
    answer = {"type": "json_schema", "json_schema": {"type": "array"}}
    demand = Demand(TOOLS, is_required=False, is_parallel=True, enforces_all=False)

    def may_say(text: str, demand: Demand | None = demand) -> bool:
        found = guide(vocabulary, name, demand, answer=answer, reasoning=THINK)
        return fits(tokenizer, found, text)

    assert may_say("[1]")
    assert may_say("<think>hm [</think>\n\n[1]")
    assert may_say("<think>hm</think>" + call_of(name, "point", {"x": 1}))
    assert not may_say("text")
    assert not may_say("<think>hm</think>text")
    assert may_say("<think>hm</think>[]", None)
    assert not may_say(call_of(name, "point", {"x": 1}), None)
    assert parsed(name, "<think>hm</think>" + call_of(name, "point", {"x": 1}), thinks=True).reasoning == "hm"
