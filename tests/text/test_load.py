"""`load_tokenizer` finds the tokenizer of a GGUF file and of a Hugging Face directory."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from gapless.errors import CorruptModel, ModelNotFound
from gapless.text import converted_tokenizer, load_tokenizer


def source(path: Path, kind: str) -> Any:
    return SimpleNamespace(name="model", path=path, kind=kind)


def test_gguf(smollm2_path: Path) -> None:
    assert load_tokenizer(source(smollm2_path, "gguf")).eos_token == "<|im_end|>"


def test_directory(tmp_path: Path, backend: Backend) -> None:
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(source(tmp_path, "hf")).vocab_size == backend.get_vocab_size()


TEXTS = ("hello the world", "  two  spaces\n\nand lines ", "<|im_start|>the fox<|im_end|>", "naïve café 日本語 😀", "")
MESSAGES = [{"role": "user", "content": "the lazy dog"}, {"role": "assistant", "content": "hello"}]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def write_sentencepiece(folder: Path) -> None:
    sentencepiece: Any = pytest.importorskip("sentencepiece")
    text = folder / "text"
    text.write_text("the quick brown fox jumps over the lazy dog\nhello world, how are you? 0 1 2 3\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<|im_start|>", "<|im_end|>"],
        minloglevel=2,
    )
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False} | named
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_tekken(folder: Path) -> None:
    words = [bytes([i]) for i in range(256)] + [b"th", b"the", b" the", b"he", b"ll", b"hell", b"hello"]
    vocab = [{"rank": i, "token_bytes": base64.b64encode(word).decode()} for i, word in enumerate(words)]
    special = [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(("<unk>", "<s>", "</s>"))]
    sizes = {"num_vocab_tokens": len(vocab), "default_vocab_size": len(vocab) + 8, "default_num_special_tokens": 8}
    config = {"pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s+|[^\s\p{L}\p{N}]+", "version": "v7"} | sizes
    content = {"config": config, "vocab": vocab, "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(content))


@pytest.mark.parametrize("write", [write_sentencepiece, write_tekken])
def test_other_formats_have_the_ids_and_templates_of_transformers(tmp_path: Path, write: Any) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    write(tmp_path)
    found = load_tokenizer(source(tmp_path, "hf"))
    kind: Any = AutoTokenizer
    expected = kind.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = expected(text).input_ids
        assert found.encode(text) == ids, text
        assert found.encode(text, add_special_tokens=False) == expected(text, add_special_tokens=False).input_ids
        assert found.decode(ids) == expected.decode(ids, skip_special_tokens=True)
    assert (found.bos_token, found.eos_token) == (expected.bos_token, expected.eos_token)
    assert found.chat_template == expected.chat_template
    if found.chat_template:
        ids = expected.apply_chat_template(MESSAGES, tokenize=True, return_dict=False)
        assert found.encode(TEMPLATE_TEXT, add_special_tokens=False) == ids


TEMPLATE_TEXT = "<|im_start|>the lazy dog<|im_end|><|im_start|>hello<|im_end|>"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json"])
def test_files_that_are_neither(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xff" * 100)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CorruptModel, match=f"{name}: transformers cannot convert it") as caught:
        load_tokenizer(source(tmp_path, "hf"))
    assert "\n" not in str(caught.value)


def test_packages_to_install_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").touch()
    monkeypatch.setattr(converted_tokenizer, "_is_installed", lambda package: package == "transformers")
    with pytest.raises(
        ModelNotFound, match=r"needs sentencepiece, google\.protobuf: pip install 'gapless\[tokenizers\]'"
    ):
        load_tokenizer(source(tmp_path, "hf"))
