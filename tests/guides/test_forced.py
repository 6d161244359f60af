"""Text that must come: found where there is one continuation only, and written as the tokenizer writes it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from wanderers import allowed

from gapless.core.guide import Guide
from gapless.core.structured import read_structured
from gapless.guides.automaton import AutomatonGuide, automaton_of
from gapless.guides.grammar import Grammar, GrammarGuide
from gapless.guides.masks import fill_mask, forced_runs
from gapless.guides.tokens import TokenGuide, join
from gapless.guides.vocabulary import Vocabulary
from gapless.text.parts import TokenizerParts
from gapless.text.tokenizer import Tokenizer

EOS = "<end>"
INVOICE = {
    "type": "object",
    "properties": {
        "invoice_number": {"type": "integer"},
        "currency": {"enum": ["euro", "euphoria"]},
        "line_items": {"type": "array", "items": {"type": "boolean"}, "minItems": 3},
    },
    "required": ["invoice_number", "currency", "line_items"],
    "additionalProperties": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": INVOICE},
    "compact": {"json_schema": INVOICE, "disable_any_whitespace": True},
    "choice": {"choice": ["international", "internal affairs", "none"]},
    "regex": {"regex": "Dear (Sir|Madam), thank you for your letter of [0-9]{4}\\."},
}


def automaton(vocabulary: Vocabulary, **spec: Any) -> AutomatonGuide:
    found = automaton_of(read_structured(spec), vocabulary.bytes, vocabulary.num_words)
    assert found is not None
    return found.guide()


def grammar(vocabulary: Vocabulary, **spec: Any) -> GrammarGuide:
    return Grammar(read_structured(spec), vocabulary).guide()


def take(guide: Guide, tokens: list[int]) -> None:
    guide.advance(np.array(tokens, np.int32))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_else_can_come(shape: str, seed: int, smollm2: Tokenizer, words: Vocabulary) -> None:
    """As llguidance sees it, at every place of a random text, also where the automaton finds less."""
    rng, vocabulary = np.random.default_rng(seed), words
    guide, oracle = automaton(vocabulary, **SHAPES[shape]), grammar(vocabulary, **SHAPES[shape])
    found = 0
    for _ in range(60):
        run = list(guide.forced())
        found += len(run)
        assert oracle.matcher.compute_ff_bytes().startswith(vocabulary.tokenizer.decode_bytes(run))
        token = int(rng.choice(run[:1] or allowed(guide, vocabulary)))
        assert not run or run[0] in allowed(guide, vocabulary)
        take(guide, [token])
        take(oracle, [token])
        if guide.is_over:
            break
    assert found


@pytest.mark.parametrize("make", [automaton, grammar])
def test_it_is_spelled_as_the_tokenizer_spells_it(make: Any, smollm2: Tokenizer, words: Vocabulary) -> None:
    guide = make(words, **SHAPES["compact"])
    text = '{"invoice_number":'
    run = list(guide.forced())
    assert len(run) > 2
    assert run == list(smollm2.encode(text))[: len(run)]
    assert text.startswith(smollm2.decode(run))


def test_the_last_token_may_depend_on_what_follows(words: Vocabulary) -> None:
    """A quote and a colon are one token, and so are they with a quote behind them."""
    spell = words.spell
    assert spell(b'name":', False) == spell(b"name", True)
    assert len(spell(b'name":', True)) == 2
    assert spell(b"", False) == ()


def test_a_text_that_ends_is_written_to_its_end(smollm2: Tokenizer, words: Vocabulary) -> None:
    guide = automaton(words, **SHAPES["choice"])
    take(guide, list(smollm2.encode("internat")))
    run = list(guide.forced())
    assert smollm2.decode(run) == "ional"
    take(guide, run)
    assert guide.is_over
    assert list(guide.forced()) == []


@pytest.mark.parametrize("make", [automaton, grammar])
def test_a_text_that_may_end_is_not_forced_on(make: Any, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    guide = make(vocabulary, regex="abc(def)?")
    take(guide, list(tokenizer.encode("abc")))
    assert not guide.is_over
    assert list(guide.forced()) == []
    take(guide, list(tokenizer.encode("d")))
    assert list(guide.forced()) == list(tokenizer.encode("ef"))


def test_a_counted_array_may_end_where_it_has_enough(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 40}
    guide = automaton(vocabulary, json_schema=schema, disable_any_whitespace=True)
    text = ""
    while not guide.is_over:
        run = [*guide.forced(), *allowed(guide, vocabulary)][:1]
        text += tokenizer.decode(run)
        take(guide, [token for token in run if token < 256])
        if text.endswith("1") and text.count("1") == 40:
            break
    assert json.loads(text + "]") == [1] * 40
    assert list(guide.forced()) == []


def test_several_guides_at_once(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    plain = TokenGuide(np.full(vocabulary.num_words, -1, np.int32))
    joined = join(plain, automaton(vocabulary, regex="abc"))
    assert joined is not None
    guides = [
        plain,
        automaton(vocabulary, regex="[0-9]abc"),
        grammar(vocabulary, regex="xyz"),
        joined,
        automaton(vocabulary, regex="abc"),
    ]
    assert {index: tokenizer.decode(list(run)) for index, run in forced_runs(guides, {}).items()} == {
        2: "xyz",
        4: "abc",
    }


def test_a_mask_allows_no_part_of_the_next_token(smollm2: Tokenizer, words: Vocabulary) -> None:
    guide = automaton(words, **SHAPES["regex"])
    assert len(allowed(guide, words)) > 1  # beginnings of the word
    mask = np.full(words.num_words, -1, np.int32)
    fill_mask(guide, mask)
    tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    assert tokens == list(smollm2.encode("Dear "))[:1]


@pytest.fixture(scope="module")
def numbers() -> Vocabulary:
    """A tokenizer that cuts digits in groups of three, as many do: 4567 is 456 and 7, and 67 is one token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {text: id for id, text in enumerate([*letters, "45", "67", EOS])}
    backend = Backend(models.BPE(tokens, [("4", "5"), ("6", "7")]))
    groups = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([groups, as_bytes])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(EOS, special=True)])
    return Vocabulary(Tokenizer(TokenizerParts(backend)), len(tokens), [tokens[EOS]])


@pytest.mark.parametrize("make", [automaton, grammar])
def test_a_run_is_spelled_once(make: Any, numbers: Vocabulary) -> None:
    """Whether it is fed at once, sampled token by token, or sampled in part elsewhere."""
    run = list(make(numbers, regex="4567[a-z]").forced())
    assert [numbers.tokenizer.decode_bytes([token]) for token in run] == [b"45", b"6", b"7"]
    guide = make(numbers, regex="4567[a-z]")
    for place in range(3):
        resumed = make(numbers, regex="4567[a-z]")
        take(resumed, run[:place])
        assert list(guide.forced()) == list(resumed.forced()) == run[place:]
        take(guide, run[place : place + 1])
    assert list(guide.forced()) == []


@pytest.mark.parametrize("make", [automaton, grammar])
def test_tokens_that_the_model_lacks_are_not_forced(make: Any, tokenizer: Tokenizer) -> None:
    """A tokenizer may have more tokens than its model; a mask of the model has no place for them."""
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    assert a < b
    small = Vocabulary(tokenizer, b, [256, 257])
    assert list(make(small, regex="aab").forced()) == [a, a]
    assert list(make(small, regex="ba").forced()) == []


def test_a_text_may_be_forced_only_where_its_tokens_are_known(tokenizer: Tokenizer) -> None:
    guide, mask = automaton(Vocabulary(tokenizer, 64, [256, 257]), regex="ba"), np.zeros(2, np.int32)
    fill_mask(guide, mask)
    assert not mask.any()
