"""Text to token ids and back.

Owns the model's vocabulary, its special tokens and its chat template string. Knows how a finished sequence of ids
decodes; does not know requests, streams of tokens (`detokenizer`) or how a template is rendered (`chat`).
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from gapless.errors import InvalidRequest, PromptTooLong
from gapless.text.byte_alphabet import BYTE_OF
from gapless.text.cleanup import clean_up
from gapless.text.control import LONG_TEXT, ControlTokens
from gapless.text.gguf_tokenizer import read_gguf
from gapless.text.hf_tokenizer import read_directory
from gapless.text.parts import TokenizerParts

HUGE_TEXT = 2**16  # characters; longer ones are counted in pieces of this size before they are encoded
TRIMMED_TEXT = 2**20  # characters; an encoding of more takes hundreds of megabytes, which malloc would keep
CHARACTERS_A_TOKEN = 512  # no tokenizer makes longer tokens on average: longer texts cannot fit


class Tokenizer:
    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._backend = parts.backend
        self.vocab_size: int = parts.backend.get_vocab_size(with_added_tokens=True)
        self.byte_pieces: Mapping[int, bytes] = _BytePieces(parts.backend)
        self.control = ControlTokens(parts.backend)
        self.special_ids = self.control.ids

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """From a Hugging Face directory: tokenizer.json and the small JSON files beside it."""
        return cls(read_directory(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file."""
        return cls(read_gguf(metadata))

    def with_template(self, template: str) -> Tokenizer:
        """The same tokenizer with a different chat template."""
        return Tokenizer(replace(self._parts, chat_template=template))

    @property
    def bos_token(self) -> str | None:
        return self._parts.bos_token

    @property
    def eos_token(self) -> str | None:
        return self._parts.eos_token

    @property
    def chat_template(self) -> str | None:
        return self._parts.chat_template

    @property
    def cleans_up_spaces(self) -> bool:
        return self._parts.clean_up_spaces

    @property
    def added_tokens(self) -> Mapping[int, str]:
        """Tokens beside the model's own vocabulary, special or not, by id."""
        return {id: token.content for id, token in self._backend.get_added_tokens_decoder().items() if token.content}

    @cached_property
    def decoder_steps(self) -> tuple[str, ...]:
        """The kinds of the decoder's steps, as tokenizer.json names them; Join where tokens are simply joined."""
        decoder = json.loads(bytes(self._backend.decoder.__getstate__())) if self._backend.decoder is not None else None
        decoder = decoder or {"type": "Join"}
        return tuple(step["type"] for step in decoder.get("decoders", [decoder]))

    @property
    def definition(self) -> str:
        """The whole tokenizer, in the format of tokenizer.json."""
        return str(self._backend.to_str())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Special tokens written out in a text are recognized."""
        for text in texts:
            require_text(text)
        if len(texts) == 1 and len(texts[0]) < LONG_TEXT:
            return [list(self._backend.encode(texts[0], add_special_tokens=add_special_tokens).ids)]
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        ids = [list(encoding.ids) for encoding in encodings]
        if sum(map(len, texts)) > TRIMMED_TEXT:
            del encodings
            give_memory_back()
        return ids

    def check_length(self, text: str, most: int) -> None:
        """Raise PromptTooLong for a text of certainly more than `most` tokens; costs no more than `most` tokens do.

        Pieces are encoded separately and their tokens counted. A cut changes a few of the 128 or more tokens that a
        piece may have, never half of them.
        """
        if len(text) > most * CHARACTERS_A_TOKEN:
            raise PromptTooLong(most, f"more than {most * CHARACTERS_A_TOKEN} characters")
        if len(text) <= max(HUGE_TEXT, 2 * most):
            return
        count = 0
        for end in range(HUGE_TEXT, len(text) + HUGE_TEXT, HUGE_TEXT):
            count += len(self.encode(text[end - HUGE_TEXT : end], add_special_tokens=False))
            if count > 2 * most:
                given = f"{len(text)} characters, of which the first {min(end, len(text))} are too many"
                raise PromptTooLong(most, given)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids outside the vocabulary decode to nothing."""
        text = self.decode_raw(ids, skip_special_tokens=skip_special_tokens)
        return clean_up(text) if self.cleans_up_spaces else text

    def decode_raw(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Like `decode`, before the clean-up of spaces."""
        if len(ids) < LONG_TEXT:
            return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        return str(self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0])

    def id_to_token(self, id: int) -> str | None:
        """The vocabulary's own spelling of a token; None for an unknown id."""
        return self._backend.id_to_token(id)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)


class _BytePieces(dict[int, bytes]):
    """The bytes of each token of a byte-level vocabulary, looked up once; an unknown id has none."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, id: int) -> bytes:
        token = self._backend.id_to_token(id) or ""
        piece = bytes(BYTE_OF[char] for char in token) if all(char in BYTE_OF for char in token) else token.encode()
        self[id] = piece
        return piece


def give_memory_back() -> None:
    """Return freed memory to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def require_text(text: object) -> None:
    """Raise InvalidRequest for text that the tokenizer cannot read."""
    if not isinstance(text, str):
        raise InvalidRequest(f"a prompt must be a string, not {type(text).__name__}", "prompt")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"{error.object[error.start]!r} at position {error.start}"
        raise InvalidRequest(f"the text is not valid Unicode: lone surrogate {where}", "prompt") from None
