"""Reads a Hugging Face tokenizer directory.

Knows tokenizer.json (or has other formats converted to it), tokenizer_config.json, special_tokens_map.json and
chat_template.jinja. What is put around a text is tokenizer.json's own post-processor alone, as in transformers 5:
`add_bos_token` and `add_eos_token` of the config are not read. The ids that end a text are the model's
(`models.config`). Does not know weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from gapless.errors import CorruptModel, ModelNotFound
from gapless.models.files import is_there, read_object, read_text, shown
from gapless.text.converted_tokenizer import convert, convertible
from gapless.text.parts import TokenizerParts

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_directory(path: Path) -> TokenizerParts:
    config = _read_config(path)
    if not is_there(path / "tokenizer.json") and (other := convertible(path)) is not None:
        found = convert(path, other)
        backend = _backend(found.pop("tokenizer"), path / other)
        config = {name: token for name, token in found.items() if token is not None} | config
    else:
        backend = _read_backend(path / "tokenizer.json")
    bos, eos = (_content(config.get(name), name) for name in ("bos_token", "eos_token"))
    _mark_special(backend, config)
    cleans = bool(config.get("clean_up_tokenization_spaces")) and not isinstance(backend.model, BPE)
    return TokenizerParts(
        backend=backend,
        bos_token=bos,
        eos_token=eos,
        chat_template=_chat_template(path, config),
        clean_up_spaces=cleans,
    )


def _read_backend(path: Path) -> Backend:
    if not is_there(path):
        raise ModelNotFound(
            f"{path.parent} has no tokenizer.json, so text cannot be tokenized; add the file, "
            "or send prompts as token ids, which need no tokenizer"
        )
    return _backend(read_text(path), path)


def _backend(text: str, path: Path) -> Backend:
    """path: where the text is from."""
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception for whatever its parser dislikes
        raise CorruptModel(f"{path} is not a readable tokenizer: {error}") from error
    # The file may carry the truncation and padding of a training run; a prompt must be neither cut nor padded.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_config(path: Path) -> dict[str, Any]:
    own = read_object(path / "tokenizer_config.json", optional=True)
    return read_object(path / "special_tokens_map.json", optional=True) | own


def _content(token: object, name: str) -> str | None:
    """A special token is written as a string or as a serialized AddedToken."""
    content = token.get("content") if isinstance(token, dict) else token
    if content is not None and not (isinstance(content, str) and _is_unicode(content)):
        raise CorruptModel(f"tokenizer_config.json: {name} is {shown(token)}, not a token")
    return content


def _is_unicode(text: str) -> bool:
    """False for lone surrogates, which JSON can spell and no tokenizer can hold."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _mark_special(backend: Backend, config: Mapping[str, Any]) -> None:
    """Tokens that the config names as special are special even where tokenizer.json does not say so."""
    known = (token for token in _special_tokens(config) if backend.token_to_id(token) is not None)
    present = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [token for token in dict.fromkeys(known) if token not in present]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])


def _special_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    named = [(name, config.get(name)) for name in _NAMED_TOKENS]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(name) or []
        if not isinstance(extra, list | dict):
            raise CorruptModel(f"tokenizer_config.json: {name} is {shown(extra)}, not a list of tokens")
        named += [(name, token) for token in (extra.values() if isinstance(extra, dict) else extra)]
    contents = (_content(token, name) for name, token in named)
    return (content for content in contents if content is not None)


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if is_there(file):
        return read_text(file)
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
