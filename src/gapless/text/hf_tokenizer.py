"""Reads a Hugging Face tokenizer directory.

Knows tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja and the end-of-text ids of
generation_config.json or config.json. What is put around a text is tokenizer.json's own post-processor alone, as in
transformers 5: `add_bos_token` and `add_eos_token` of the config are not read. Does not know weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from gapless.errors import CorruptModel, ModelNotFound
from gapless.text.parts import TokenizerParts

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_directory(path: Path) -> TokenizerParts:
    backend = _read_backend(path / "tokenizer.json")
    config = _read_json(path / "special_tokens_map.json") | _read_json(path / "tokenizer_config.json")
    bos, eos = _content(config.get("bos_token")), _content(config.get("eos_token"))
    _mark_special(backend, config)
    cleans = bool(config.get("clean_up_tokenization_spaces")) and not isinstance(backend.model, BPE)
    return TokenizerParts(
        backend=backend,
        bos_token=bos,
        eos_token=eos,
        eos_token_ids=_eos_ids(path, backend, eos),
        chat_template=_chat_template(path, config),
        clean_up_spaces=cleans,
    )


def _read_backend(path: Path) -> Backend:
    if not path.is_file():
        raise ModelNotFound(
            f"{path.parent} has no tokenizer.json, so text cannot be tokenized; add the file, "
            "or send prompts as token ids, which need no tokenizer"
        )
    try:
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises bare Exception for whatever its parser dislikes
        raise CorruptModel(f"{path} is not a readable tokenizer: {error}") from error
    # The file may carry the truncation and padding of a training run; a prompt must be neither cut nor padded.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptModel(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _content(token: object) -> str | None:
    """A special token is written as a string or as a serialized AddedToken."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _mark_special(backend: Backend, config: Mapping[str, Any]) -> None:
    """Tokens that the config names as special are special even where tokenizer.json does not say so."""
    known = (token for token in _special_tokens(config) if backend.token_to_id(token) is not None)
    present = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [token for token in dict.fromkeys(known) if token not in present]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])


def _special_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    values = [config.get(name) for name in _NAMED_TOKENS]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(name) or []
        values += list(extra.values()) if isinstance(extra, dict) else list(extra)
    contents = (_content(value) for value in values)
    return (content for content in contents if content is not None)


def _eos_ids(path: Path, backend: Backend, eos: str | None) -> tuple[int, ...]:
    """The ids that end a text: the tokenizer's own first, then those of the generation config (or the model's)."""
    own = backend.token_to_id(eos) if eos is not None else None
    listed = _read_json(path / "generation_config.json").get("eos_token_id")
    if listed is None:
        listed = _read_json(path / "config.json").get("eos_token_id")
    ids = [own, *(listed if isinstance(listed, list) else [listed])]
    return tuple(dict.fromkeys(id for id in ids if isinstance(id, int)))


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = _default_template(path, template)
    if template is None or isinstance(template, str):
        return template
    raise CorruptModel(f"chat_template in {path / 'tokenizer_config.json'} is a {type(template).__name__}")


def _default_template(path: Path, entries: list[Any]) -> str | None:
    """Of a list of named templates, the one called default."""
    try:
        named = {entry["name"]: entry["template"] for entry in entries}
    except (TypeError, KeyError) as error:
        raise CorruptModel(f"chat_template in {path / 'tokenizer_config.json'} has an entry without {error}") from error
    return named.get("default")
