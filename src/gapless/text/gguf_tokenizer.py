"""Rebuilds a tokenizer from the metadata of a GGUF file.

Knows the keys under `tokenizer.ggml`, the two vocabulary kinds ("gpt2": byte-level BPE; "llama": SentencePiece BPE
with scores) and the pre-tokenizers by name. Does not know how the file is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from gapless.errors import CorruptModel, UnsupportedModel
from gapless.models.files import shown
from gapless.text.parts import TokenizerParts, bos_eos_processor

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "▁"
_MAX_PIECE_LENGTH = 1024  # characters; the pairs that spell a token take time in the square of its length

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_WORDS = "|".join((*_CASED, r"\p{N}", _REST))
_GPT4O_WORDS = "|".join((*(f"{word}(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for word in _CASED), r"\p{N}{1,3}", _REST))


def read_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    vocab = _Vocabulary(metadata)
    backend = _builder(vocab.text("model"))(vocab)
    _add_special(backend, vocab)
    bos, eos = vocab.token_named("bos_token_id"), vocab.token_named("eos_token_id")
    first = bos if vocab.flag("add_bos_token", default=_adds_bos(vocab)) else None
    last = eos if vocab.flag("add_eos_token", default=False) else None
    backend.post_processor = bos_eos_processor(backend, first, last)
    return TokenizerParts(
        backend=backend,
        bos_token=bos,
        eos_token=eos,
        chat_template=_chat_template(metadata.get("tokenizer.chat_template")),
    )


class _Vocabulary:
    """The `tokenizer.ggml.*` values, with errors that name the key."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = self.items("tokens", str)

    def get(self, name: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise CorruptModel(f"the GGUF metadata has no tokenizer.ggml.{name}; prompts as token ids work without it")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.get(name)
        return default if value is None else bool(value)

    def items(self, name: str, kind: type) -> list[Any]:
        value = self.get(name)
        if value is None:
            raise CorruptModel(f"the GGUF metadata has no tokenizer.ggml.{name}; prompts as token ids work without it")
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise CorruptModel(f"tokenizer.ggml.{name} is {shown(value)}, not a list of {kind.__name__}")
        return value

    def per_token(self, name: str, kind: type) -> list[Any]:
        values = self.items(name, kind)
        if len(values) != len(self.tokens):
            raise CorruptModel(f"tokenizer.ggml.{name} has {len(values)} entries for {len(self.tokens)} tokens")
        return values

    def id_named(self, name: str) -> int | None:
        id = self.get(name)
        if id is None:
            return None
        if type(id) is not int or not 0 <= id < len(self.tokens):
            raise CorruptModel(f"tokenizer.ggml.{name} is {shown(id)}, outside the {len(self.tokens)} tokens")
        return id

    def token_named(self, name: str) -> str | None:
        id = self.id_named(name)
        return None if id is None else self.tokens[id]

    def ids(self) -> dict[str, int]:
        return {token: id for id, token in enumerate(self.tokens)}


@dataclass(frozen=True)
class _PreTokenizer:
    """How a byte-level model splits text into words before merging."""

    split: pre_tokenizers.PreTokenizer | None = None
    gpt2_words: bool = False  # ByteLevel's built-in pattern
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False  # a word that is a token is taken whole
    add_bos: bool = False


def _words(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


_GPT2 = _PreTokenizer(gpt2_words=True)
_DIGITS = _PreTokenizer(pre_tokenizers.Digits(individual_digits=True), gpt2_words=True)
_COMPOSED = normalizers.NFC()
_GPT4O = _PreTokenizer(_words(_GPT4O_WORDS))
_DBRX = _PreTokenizer(_words(_LLAMA3_WORDS))
_QWEN2 = _PreTokenizer(_words(_QWEN2_WORDS), normalizer=_COMPOSED)
_LLAMA3 = _PreTokenizer(_words(_LLAMA3_WORDS), ignore_merges=True, add_bos=True)
_PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _PreTokenizer(gpt2_words=True, normalizer=_COMPOSED),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": replace(_DIGITS, normalizer=_COMPOSED),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "dbrx": _DBRX,
    "smaug-bpe": _DBRX,
    "gpt-4o": _GPT4O,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _PreTokenizer(_words(_TEKKEN_WORDS), ignore_merges=True, add_bos=True),
}


def _builder(model: str) -> Callable[[_Vocabulary], Backend]:
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        raise UnsupportedModel(f"GGUF tokenizer model {shown(model)} is not supported; known: {', '.join(builders)}")
    return builders[model]


def _pre_tokenizer(vocab: _Vocabulary) -> _PreTokenizer:
    name = vocab.text("pre") if vocab.get("pre") else "default"
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise UnsupportedModel(
            f"GGUF pre-tokenizer {shown(name)} (tokenizer.ggml.pre) is not supported; known: {known}"
        )
    return _PRE_TOKENIZERS[name]


def _byte_level(vocab: _Vocabulary) -> Backend:
    pre = _pre_tokenizer(vocab)
    merges = [_merge(line) for line in vocab.items("merges", str)]
    backend = Backend(_bpe(vocab, merges, ignore_merges=pre.ignore_merges))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2_words)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre.split, to_bytes]) if pre.split is not None else to_bytes
    if pre.normalizer is not None:
        backend.normalizer = pre.normalizer
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocab: _Vocabulary) -> Backend:
    prefix = vocab.flag("add_space_prefix", default=True)
    unknown = vocab.token_named("unknown_token_id")
    merges = _merges_by_score(vocab.tokens, vocab.per_token("scores", float))
    backend = Backend(_bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merge(line: str) -> tuple[str, str]:
    left, space, right = line.partition(" ")
    if not space:
        raise CorruptModel(f"tokenizer.ggml.merges has {shown(line)}, which is not a pair")
    return left, right


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece stores no merges: any two tokens that spell a third may merge, the best-scored result first."""
    ids = {token: id for id, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, int]] = []
    for token, id in ids.items():
        if len(token) > _MAX_PIECE_LENGTH:
            raise CorruptModel(f"tokenizer.ggml.tokens has {shown(token)} of {len(token)} characters")
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[id], id, left, right))
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(ranked)]


def _bpe(vocab: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> BPE:
    try:
        return BPE(vocab=vocab.ids(), merges=merges, **options)
    except Exception as error:  # tokenizers raises bare Exception, e.g. for a merge of a token that is not there
        raise CorruptModel(f"the vocabulary in the GGUF metadata does not fit its merges: {error}") from error


def _add_special(backend: Backend, vocab: _Vocabulary) -> None:
    """Control and unknown tokens, bos and eos are special; user-defined ones are matched whole, but shown."""
    types = vocab.per_token("token_type", int) if vocab.get("token_type") is not None else [_NORMAL] * len(vocab.tokens)
    named = {vocab.token_named("bos_token_id"), vocab.token_named("eos_token_id")}
    typed = list(zip(vocab.tokens, types, strict=True))
    special = [token for token, kind in typed if kind in (_CONTROL, _UNKNOWN) or token in named]
    shown = [token for token, kind in typed if kind == _USER_DEFINED and token not in named]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in shown])


def _adds_bos(vocab: _Vocabulary) -> bool:
    """The default for files without the key: SentencePiece models and some byte-level ones start with bos."""
    return vocab.text("model") == "llama" or _pre_tokenizer(vocab).add_bos


def _chat_template(template: object) -> str | None:
    if template is None or isinstance(template, str):
        return template
    raise CorruptModel(f"tokenizer.chat_template is {shown(template)}, not a string")
