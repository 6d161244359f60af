"""Tokenizers read from Hugging Face directories."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from gapless.errors import CorruptModel, InvalidRequest, ModelNotFound, PromptTooLong
from gapless.text.tokenizer import HUGE_TEXT, Tokenizer


@pytest.fixture
def directory(tmp_path: Path, backend: Backend) -> Path:
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(path: Path, **files: Any) -> Path:
    """Adds to a tokenizer directory: `tokenizer_config={...}` becomes tokenizer_config.json."""
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def test_reads_a_directory(directory: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "T"}
    tokenizer = Tokenizer.from_directory(write(directory, tokenizer_config=config))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == ("<s>", "</s>", "T")
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.decode(tokenizer.encode("naïve café <s>x")) == "naïve café x"
    assert tokenizer.decode(tokenizer.encode("<s>x"), skip_special_tokens=False) == "<s>x"


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("add_eos", [True, False, None])
def test_bos_and_eos_as_transformers_adds_them(
    directory: Path, backend: Backend, add_bos: bool | None, add_eos: bool | None
) -> None:
    from transformers import PreTrainedTokenizerFast

    flags = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    config = {"bos_token": "<s>", "eos_token": "</s>"} | {k: v for k, v in flags.items() if v is not None}
    write(directory, tokenizer_config=config)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(directory / "tokenizer.json"))
    reference = PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.encode("the cat") == reference("the cat")["input_ids"]
    assert (
        tokenizer.encode("the cat", add_special_tokens=False) == backend.encode("the cat", add_special_tokens=False).ids
    )


def test_named_special_tokens_become_special(directory: Path) -> None:
    config = {"additional_special_tokens": ["with space", "not in the vocabulary"]}
    tokenizer = Tokenizer.from_directory(write(directory, special_tokens_map=config))
    assert tokenizer.decode(tokenizer.encode("a with space b")) == "a  b"
    assert tokenizer.token_to_id("not in the vocabulary") is None


def test_chat_template_places(directory: Path) -> None:
    named = [{"name": "tool_use", "template": "A"}, {"name": "default", "template": "B"}]
    assert Tokenizer.from_directory(write(directory, tokenizer_config={"chat_template": named})).chat_template == "B"
    (directory / "chat_template.jinja").write_text("C")
    assert Tokenizer.from_directory(directory).chat_template == "C"


@pytest.mark.parametrize("template", [3, [{"name": "default"}], ["x"]])
def test_a_damaged_chat_template(directory: Path, template: Any) -> None:
    with pytest.raises(CorruptModel, match="chat_template in"):
        Tokenizer.from_directory(write(directory, tokenizer_config={"chat_template": template}))


def test_truncation_and_padding_of_the_file_are_dropped(directory: Path, backend: Backend) -> None:
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(directory / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.decode(tokenizer.encode("the cat sat")) == "the cat sat"


def test_encode_batch_equals_encode(byte_level: Tokenizer) -> None:
    texts = ["the cat", "", "😀"]
    assert byte_level.encode_batch(texts) == [byte_level.encode(text) for text in texts]


def test_clean_up_is_for_word_piece_only(directory: Path) -> None:
    config = {"clean_up_tokenization_spaces": True}
    tokenizer = Tokenizer.from_directory(write(directory, tokenizer_config=config))
    assert tokenizer.decode(tokenizer.encode("a . b")) == "a . b"


def test_a_missing_tokenizer_says_what_works_without(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no tokenizer\.json.*token ids"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config", "special_tokens_map"])
@pytest.mark.parametrize("content", ["{", "[]", "", "\x00"])
def test_damaged_files(directory: Path, name: str, content: str) -> None:
    (directory / f"{name}.json").write_text(content)
    with pytest.raises(CorruptModel, match=re.escape(str(directory))):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize("text", ["a\ud800b", 3, None, b"x"])
def test_refuses_what_is_not_text(byte_level: Tokenizer, text: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"not valid Unicode|must be a string"):
        byte_level.encode(text)


def test_a_text_that_is_too_long_is_not_tokenized_whole(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    encode = byte_level.encode

    def watched(text: str, **options: Any) -> list[int]:
        pieces.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(byte_level, "encode", watched)
    with pytest.raises(PromptTooLong, match=r"maximum context length is 10000 tokens.*the first 65536"):
        byte_level.check_length("xyz " * 900_000, 10_000)
    assert pieces == [HUGE_TEXT]
    with pytest.raises(PromptTooLong, match="more than 51200 characters"):
        byte_level.check_length("x" * 51_201, 100)
    assert pieces == [HUGE_TEXT], "the number of characters is enough to tell"


def test_no_text_that_fits_is_refused(small_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.text.tokenizer.HUGE_TEXT", 256)

    @settings(deadline=None)
    @given(st.text("the cat€ \n.", max_size=40), st.integers(1, 300))
    def holds(text: str, times: int) -> None:
        whole = text * times
        count = len(small_tokenizer.encode(whole, add_special_tokens=False))
        small_tokenizer.check_length(whole, max(count, len(whole) // 64 + 1))  # a piece has room for 4, really for 128

    holds()


def test_memory_of_a_long_text_is_given_back(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr("gapless.text.tokenizer.give_memory_back", lambda: calls.append(None))
    byte_level.encode("x" * 10_000)
    assert not calls
    monkeypatch.setattr("gapless.text.tokenizer.TRIMMED_TEXT", 9_999)
    byte_level.encode("x" * 10_000)
    assert len(calls) == 1


def test_imports_no_torch() -> None:
    code = (
        "import sys, gapless.text.detokenizer, gapless.text.chat, gapless.text.stop; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("value", [5, "<a>", [["<a>"]], [5], [{"content": 5}], {"a": [1]}])
def test_special_tokens_of_the_wrong_type(directory: Path, key: str, value: Any) -> None:
    with pytest.raises(CorruptModel, match=rf"tokenizer_config\.json: {key} is"):
        Tokenizer.from_directory(write(directory, tokenizer_config={key: value}))


@pytest.mark.parametrize("value", [5, True, ["<s>"], {"content": [1]}, "\ud800"])
def test_a_named_token_of_the_wrong_type(directory: Path, value: Any) -> None:
    with pytest.raises(CorruptModel, match="eos_token is"):
        Tokenizer.from_directory(write(directory, tokenizer_config={"eos_token": value}))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_files_that_are_no_text(directory: Path, name: str) -> None:
    path = directory / name
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(CorruptModel, match=f"{name}: is not UTF-8"):
        Tokenizer.from_directory(directory)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CorruptModel, match=f"{name}: is a FIFO"):
        Tokenizer.from_directory(directory)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(CorruptModel, match=f"{name}: cannot be read"):
        Tokenizer.from_directory(directory)


def test_a_config_nested_too_deeply(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(CorruptModel, match=r"tokenizer_config\.json: is nested too deeply"):
        Tokenizer.from_directory(directory)


def test_a_chat_template_that_would_take_minutes_to_compile(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{a+a}}" * 2**16)
    with pytest.raises(CorruptModel, match="the chat template has 458752 characters; at most 262144 are read"):
        Tokenizer.from_directory(directory)
