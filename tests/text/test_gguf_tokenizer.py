"""Tokenizers rebuilt from GGUF metadata."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from gapless.errors import CorruptModel, UnsupportedModel
from gapless.text.gguf_tokenizer import read_gguf
from gapless.text.tokenizer import Tokenizer

Metadata = Callable[..., dict[str, Any]]
TEXTS = [
    "Hello world",
    "  two  spaces\t\ttabs\n\n\nnewlines   ",
    "def f(x):\n    return x**2  # café",
    "12345 3.14159 a1b22c333 2024-01-01",
    "😀👩‍👩‍👧‍👦🇩🇪 emoji",
    "日本語 中文 한국어 العربية हिन्दी",
    "e\u0301 é ﬁ don't I'll WE'VE",
    "<|im_start|>user\nhi 12<|im_end|>\n<|endoftext|> 3",
    "",
    " ",
    "\x00\x01\x7f",
]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_equals_transformers(smollm2: Tokenizer, reference: Any, text: str) -> None:
    ids = smollm2.encode(text)
    assert ids == reference(text)["input_ids"]
    assert smollm2.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert smollm2.decode(ids, skip_special_tokens=False) == text


def test_smollm2_splits_all_digits(smollm2: Tokenizer) -> None:
    """As the model's own tokenizer.json does; the GGUF reader of transformers drops the digit step."""
    assert smollm2.encode("½٣") == smollm2.encode("½") + smollm2.encode("٣")
    assert smollm2.encode(" ²") == smollm2.encode(" ") + smollm2.encode("²")


def test_smollm2_facts(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.chat_template is not None


def test_builds_quickly(smollm2_path: Path) -> None:
    from gapless.models.gguf_file import GGUFFile

    metadata = GGUFFile(smollm2_path).metadata
    begin = time.perf_counter()
    Tokenizer.from_gguf(metadata)
    assert time.perf_counter() - begin < 1


def byte_level_metadata(**changes: object) -> dict[str, object]:
    """Every byte and a few merges."""
    tokens = ["<bos>", "<user>", *ALPHABET, "he", "hel", "lo", "hello", "12", "123", "'s"]
    values: dict[str, object] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3, 4, *[1] * (len(tokens) - 2)],
        "merges": ["h e", "he l", "l o", "1 2", "12 3", "' s"],
        "bos_token_id": 0,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (values | changes).items() if value is not None}


def pieces(text: str, **changes: object) -> list[str]:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(**changes))
    return [str(tokenizer.id_to_token(id)) for id in tokenizer.encode(text)]


def test_pre_tokenizers() -> None:
    assert pieces("1234") == ["123", "4"]
    assert pieces("1234", pre="smollm") == ["1", "2", "3", "4"]
    assert pieces("1234", pre="qwen2") == ["1", "2", "3", "4"]
    assert pieces("1234", pre="llama-bpe") == ["<bos>", "123", "4"]
    assert pieces("X'S", pre="qwen2") == ["X", "'", "S"]
    assert pieces("1234", pre=None) == ["123", "4"]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["HelloWorld", "'s", "Ġ1234", "/", "Ċ"]),
        ("olmo", ["HelloWorld", "'s", "Ġ1234", "/", "Ċ"]),
        ("refact", ["HelloWorld", "'s", "Ġ", "1", "2", "3", "4", "/", "Ċ"]),
        ("command-r", ["HelloWorld", "'s", "Ġ", "1", "2", "3", "4", "/", "Ċ"]),
        ("dbrx", ["HelloWorld", "'s", "Ġ", "123", "4", "/Ċ"]),
        ("smaug-bpe", ["HelloWorld", "'s", "Ġ", "123", "4", "/Ċ"]),
        ("falcon3", ["HelloWorld", "'s", "Ġ", "123", "4", "/Ċ"]),
        ("deepseek-r1-qwen", ["HelloWorld", "'s", "Ġ", "1", "2", "3", "4", "/Ċ"]),
        ("tekken", ["Hello", "World", "'s", "Ġ", "1", "2", "3", "4", "/Ċ"]),
        ("gpt-4o", ["Hello", "World's", "Ġ", "123", "4", "/Ċ"]),
    ],
)
def test_words_that_texts_are_split_into(pre: str, expected: list[str]) -> None:
    backend = read_gguf(byte_level_metadata(pre=pre)).backend
    assert backend.pre_tokenizer is not None
    assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("HelloWorld's 1234/\n")] == expected


def test_ignore_merges_takes_a_whole_word() -> None:
    assert pieces("hello") == ["hel", "lo"]
    assert pieces("hello", pre="llama-bpe", add_bos_token=False) == ["hello"]


def test_qwen2_composes_characters() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre="qwen2"))
    assert tokenizer.encode("\u212a") == tokenizer.encode("K")


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken"])
@given(text=st.text(max_size=30).map(lambda text: normalize("NFC", text)))
@settings(max_examples=50, deadline=None)
def test_byte_level_round_trip(pre: str, text: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre=pre, token_type=None))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_user_defined_tokens_are_whole_and_shown() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata())
    assert tokenizer.encode("h<user>h") == [*tokenizer.encode("h"), 1, *tokenizer.encode("h")]
    assert tokenizer.decode([1]) == "<user>"
    assert tokenizer.decode([0]) == ""


def test_eos_is_put_after_a_text_where_the_file_says_so() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(eos_token_id=0, add_eos_token=True))
    assert tokenizer.encode("h")[-1] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 5},
        {"tokens": [1, 2]},
        {"merges": [1]},
        {"token_type": 7},
        {"bos_token_id": "x"},
        {"eos_token_id": 1.5},
        {"eos_token_id": True},
        {"pre": [1]},
        {"model": 4},
    ],
)
def test_values_of_the_wrong_type(changes: dict[str, Any]) -> None:
    (key,) = changes
    with pytest.raises(CorruptModel, match=key):
        Tokenizer.from_gguf(byte_level_metadata(**changes))


def test_a_token_too_long_to_be_taken_apart(sentencepiece_metadata: Callable[..., dict[str, Any]]) -> None:
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.tokens"][-1] = "a" * 100_000
    with pytest.raises(CorruptModel, match="100000 characters"):
        Tokenizer.from_gguf(metadata)


def test_a_chat_template_that_is_not_text() -> None:
    with pytest.raises(CorruptModel, match="chat_template"):
        Tokenizer.from_gguf(byte_level_metadata() | {"tokenizer.chat_template": [1]})


def test_sentencepiece_prefix_bytes_and_bos(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("the cat € <fim>")
    names = [sentencepiece.id_to_token(id) for id in ids]
    assert names == ["<s>", "▁the", "▁cat", "▁", "<0xE2>", "<0x82>", "<0xAC>", "▁", "<fim>"]
    assert sentencepiece.decode(ids) == "the cat € <fim>"


def test_sentencepiece_without_prefix(sentencepiece_metadata: Metadata) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert [tokenizer.id_to_token(id) for id in tokenizer.encode("the the")] == ["th", "e", "▁the"]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


@given(text=st.text("thecasmt ", max_size=20))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_merges_the_best_score_first(
    sentencepiece: Tokenizer, sentencepiece_metadata: Metadata, text: str
) -> None:
    metadata = sentencepiece_metadata()
    score = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert [sentencepiece.id_to_token(id) for id in ids] == _merge_best_first(text, score)
    assert sentencepiece.decode(ids) == text


def _merge_best_first(text: str, score: dict[str, float]) -> list[str]:
    """SentencePiece's definition: join the neighbours that make the best-scored piece, until none does."""
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [(score[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]
        if not joins:
            return parts
        at = -max(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize(
    ("metadata", "error", "complaint"),
    [
        ({}, CorruptModel, "tokenizer.ggml.tokens"),
        (byte_level_metadata(model=None), CorruptModel, "tokenizer.ggml.model"),
        (byte_level_metadata(merges=None), CorruptModel, "tokenizer.ggml.merges"),
        (byte_level_metadata(merges=["he"]), CorruptModel, "'he', which is not a pair"),
        (byte_level_metadata(merges=["h zz"]), CorruptModel, "does not fit its merges"),
        (byte_level_metadata(token_type=[1]), CorruptModel, "token_type has 1 entries for 265 tokens"),
        (byte_level_metadata(bos_token_id=500), CorruptModel, "bos_token_id is 500"),
        (byte_level_metadata(pre="viking"), UnsupportedModel, "'viking'.*known: .*qwen2"),
        (byte_level_metadata(model="bert"), UnsupportedModel, "'bert'.*known: gpt2, llama"),
    ],
)
def test_refusals(metadata: dict[str, object], error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        Tokenizer.from_gguf(metadata)


def test_sentencepiece_needs_scores(sentencepiece_metadata: Metadata) -> None:
    with pytest.raises(CorruptModel, match=r"tokenizer\.ggml\.scores"):
        Tokenizer.from_gguf(sentencepiece_metadata(scores=None))
