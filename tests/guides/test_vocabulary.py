"""The vocabularies that grammars can read, and how special tokens are found in a text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from wanderers import allowed, guide_for, wander

from gapless.errors import InvalidRequest, UnsupportedModel
from gapless.guides.loading import load_vocabulary
from gapless.guides.vocabulary import Vocabulary
from gapless.models.source import resolve
from gapless.text.parts import TokenizerParts
from gapless.text.tokenizer import Tokenizer


def words(decoder: object) -> Tokenizer:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "<end>": 2, "c": 3}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoder
    backend.add_special_tokens(["<end>"])
    return Tokenizer(TokenizerParts(backend))


def test_both_ends_may_come_after_a_whole_text(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    guide = guide_for(vocabulary, regex="ab*")
    assert allowed(guide, vocabulary) == tokenizer.encode("a")
    guide.matcher.consume_tokens(tokenizer.encode("ab"))
    assert allowed(guide, vocabulary) == sorted([*tokenizer.encode("b"), 256, 257])


def test_ids_beyond_the_tokenizer_never_come(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    guide = guide_for(vocabulary, regex="(?s:.)*")
    assert max(allowed(guide, vocabulary)) < tokenizer.vocab_size
    assert vocabulary.num_words * 32 >= tokenizer.vocab_size + 40


def test_special_tokens_cut_a_text(vocabulary: Vocabulary) -> None:
    assert vocabulary.pieces("x <call>y</call>") == ["x ", 258, "y", 259]
    assert vocabulary.pieces("plain") == ["plain"]
    assert vocabulary.pieces("") == []


def test_a_vocabulary_of_words() -> None:
    tokenizer = words(decoders.Fuse())
    vocabulary = Vocabulary(tokenizer, 4, [2])
    assert wander(guide_for(vocabulary, regex="ab"), vocabulary, tokenizer) == "ab"


def test_a_decoder_that_changes_the_text_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="does not support this model's tokenizer"):
        Vocabulary(words(decoders.WordPiece()), 4, [2])


def test_a_model_without_tokenizer_is_refused(dummy_dir: object) -> None:
    with pytest.raises(InvalidRequest, match="needs the model's tokenizer"):
        load_vocabulary(resolve(str(dummy_dir)), 97, [0])
