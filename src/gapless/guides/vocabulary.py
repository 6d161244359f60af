"""The bytes of every token, in the form that llguidance reads. Built once for an engine, by whoever needs it first.

Knows the tokenizer's special tokens, which no text can spell, and the model's end-of-sequence ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache, partial
from itertools import takewhile

from llguidance import LLTokenizer, TokenizerWrapper

from gapless.core.guide import mask_words
from gapless.errors import UnsupportedModel
from gapless.guides.automaton import ByteVocabulary, Spell, byte_vocabulary
from gapless.text.tokenizer import Tokenizer

_LETTER = r'[^"\\\x00-\x1F\x7F]'
# Tokens by length: where a string of bounded length has room for all that short, they are allowed without a look.
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_LETTER}{{1,{most}}}" for most in (2, 4, 6, 8, 10, 12, 16, 20, 30)),
    f"{_LETTER}+",
)


class Vocabulary:
    """The tokens of a model, as grammars see them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """vocab_size: the model's. Ids that the tokenizer lacks never come in a guided text."""
        size = max(vocab_size, tokenizer.vocab_size)
        self.tokenizer = _read(tokenizer, size, [id for id in eos_token_ids if id < tokenizer.vocab_size])
        self.num_words = mask_words(size)  # of a mask; more than the model's if the tokenizer has more tokens
        self.model_size = vocab_size
        self._size = size
        self._num_known = tokenizer.vocab_size
        self._ends = [id for id in eos_token_ids if id < tokenizer.vocab_size] or [self.tokenizer.eos_token]
        added = tokenizer.added_tokens.items()
        self._special = {text: id for id, text in added if id < size and self.tokenizer.is_special_token(id)}
        self.spell: Spell = lru_cache(maxsize=4096)(partial(_spell, self.tokenizer, vocab_size))
        self._cuts = re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) or r"(?!)")

    @cached_property
    def bytes(self) -> ByteVocabulary | None:
        """For automata; None where there is no library for them."""
        read, is_special = self.tokenizer.decode_bytes, self.tokenizer.is_special_token
        texts = [b"" if is_special(id) else read([id]) for id in range(self._num_known)]
        return byte_vocabulary(texts + [b""] * (self._size - self._num_known), self._ends, self.spell)

    def pieces(self, text: str) -> list[str | int]:
        """A text cut at its special tokens: plain text, and the ids of special tokens.

        Special is what no text can spell in llguidance's grammars: also an added token such as `<tool_call>`, which the
        tokenizer itself does not call special.
        """
        found: list[str | int] = []
        end = 0
        for match in self._cuts.finditer(text):
            found += [text[end : match.start()], self._special[match[0]]]
            end = match.end()
        return [piece for piece in (*found, text[end:]) if piece != ""]


def up_to_unknown(run: Sequence[int], vocab_size: int) -> Sequence[int]:
    """The tokens before one that the model does not have."""
    return run if max(run, default=-1) < vocab_size else list(takewhile(lambda token: token < vocab_size, run))


def _spell(tokenizer: LLTokenizer, vocab_size: int, text: bytes, ends: bool) -> tuple[int, ...]:
    """The tokens in which the tokenizer writes a text; none where they are not its own.

    Unless the text ends, the last ones are left out that a longer token might replace once more of the text is known.
    """
    tokens = tokenizer.tokenize_bytes(text) if ends else tokenizer.tokenize_partial(text)[0]
    return tuple(up_to_unknown(tokens, vocab_size)) if text.startswith(tokenizer.decode_bytes(tokens)) else ()


def _read(tokenizer: Tokenizer, size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """Byte-level and SentencePiece vocabularies are read by llguidance itself, which then knows how text is merged."""
    try:
        if tokenizer.decoder_steps == ("Fuse",):
            words = _Words(tokenizer, eos_token_ids)
            return LLTokenizer(TokenizerWrapper(words), n_vocab=size, eos_token=words.eos_token_id)
        return LLTokenizer(tokenizer.definition, n_vocab=size, eos_token=eos_token_ids or None, slices=list(SLICES))
    except ValueError as error:
        raise UnsupportedModel(f"structured output does not support this model's tokenizer: {error}") from error


class _Words:
    """A vocabulary whose tokens are their own text, in the form that llguidance asks for."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: list[int]) -> None:
        self.tokens = [(tokenizer.id_to_token(id) or "").encode() for id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else 0
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
