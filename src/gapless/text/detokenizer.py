"""Incremental text from tokens.

Owns the part of a request that is not shown yet. Knows where each kind of decoder can be cut, so that the deltas add up
exactly to `Tokenizer.decode` of all ids, at a cost linear in their number. Does not know stop strings or requests.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Sequence
from typing import Protocol

from gapless.text.cleanup import CleanUpStream
from gapless.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes in UTF-8, so at most this many tokens wait for one character
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class _TextStream(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class Detokenizer:
    """Shows neither the `hidden` tokens nor, with `skip_special_tokens`, the special ones that are not `shown`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        hidden: Collection[int] = (),
        shown: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        special = tokenizer.special_ids if skip_special_tokens else frozenset()
        special = special.difference(shown) if shown else special
        self._skipped = special if special.issuperset(hidden) else special.union(hidden)
        self._stream = _open_stream(tokenizer)
        self._cleaner = CleanUpStream() if tokenizer.cleans_up_spaces else None

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` make certain; never half a character."""
        text = self._stream.push([id for id in ids if id not in self._skipped])
        return self._cleaner.push(text) if self._cleaner is not None else text

    def shows(self, id: int) -> bool:
        """Whether the token is part of the text: special and hidden ones are not."""
        return id not in self._skipped

    def finish(self) -> str:
        """The rest of the text. Bytes that never became a character show as U+FFFD."""
        text = self._stream.finish()
        return self._cleaner.push(text) + self._cleaner.finish() if self._cleaner is not None else text


def byte_of(tokenizer: Tokenizer, id: int) -> int | None:
    """The byte that a token of a byte fallback stands for; None for any other token."""
    token = tokenizer.id_to_token(id) or ""
    is_byte = _BYTE_TOKEN.fullmatch(token) and "ByteFallback" in tokenizer.decoder_steps
    return int(token[3:5], 16) if is_byte else None


def _open_stream(tokenizer: Tokenizer) -> _TextStream:
    kinds = tokenizer.decoder_steps
    if kinds == ("ByteLevel",):
        return _ByteStream(tokenizer)
    return _WindowStream(tokenizer, byte_fallback="ByteFallback" in kinds)


class _ByteStream:
    """Byte-level vocabularies: every token is bytes, so UTF-8's own incremental decoder knows complete characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = tokenizer.byte_pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join([self._pieces[id] for id in ids]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """Any other decoder: decode a few known ids together with the new ones, and show what the new ones add.

    window  [ known | new, shown by this push | a run of byte tokens, not decided yet ]

    The known ids give the new ones their context (a leading space is dropped only at the very start). Byte fallback
    turns a whole run of byte tokens into U+FFFD if the run is not valid UTF-8, so a run waits for the token after it.
    """

    def __init__(self, tokenizer: Tokenizer, *, byte_fallback: bool) -> None:
        self._tokenizer = tokenizer
        self._byte_fallback = byte_fallback
        self._window: list[int] = []
        self._num_known = 0
        self._known_text = ""

    def push(self, ids: Sequence[int]) -> str:
        num_decided = self._extend(ids)
        if num_decided <= self._num_known:
            return ""
        text = self._decode(self._window[:num_decided])
        if not text.startswith(self._known_text) or self._may_be_half_a_character(text, num_decided):
            return ""
        delta = text[len(self._known_text) :]
        self._slide(num_decided)
        return delta

    def finish(self) -> str:
        text = self._decode(self._window)[len(self._known_text) :]
        self._window, self._num_known, self._known_text = [], 0, ""
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode_raw(ids, skip_special_tokens=False)

    def _extend(self, ids: Sequence[int]) -> int:
        """Append the ids that name a token; returns how many of the window are decided."""
        num_decided = self._num_known
        for id in ids:
            token = self._tokenizer.id_to_token(id)
            if token is None:
                continue
            self._window.append(id)
            if not (self._byte_fallback and _BYTE_TOKEN.fullmatch(token)):
                num_decided = len(self._window)
        return num_decided

    def _may_be_half_a_character(self, text: str, num_decided: int) -> bool:
        """U+FFFD at the end, and too few new tokens to be sure that the model really produced it."""
        return text.endswith(_REPLACEMENT) and num_decided - self._num_known < _LONGEST_CHARACTER

    def _slide(self, num_decided: int) -> None:
        """Keep as known the fewest decided ids that show any text: an id without text gives no context."""
        start = num_decided - 1
        while start > 0 and not self._decode(self._window[start:num_decided]):
            start -= 1
        self._window = self._window[start:]
        self._num_known = num_decided - start
        self._known_text = self._decode(self._window[: self._num_known])
