"""The special tokens of a vocabulary: finds them in a text, and encodes text without them.

Uses the tokenizers library's own matching, so that it finds exactly what an encoding would find. Does not know
messages.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from gapless.text.byte_alphabet import CHAR_OF

LONG_TEXT = 2000  # characters, or tokens; only as a batch does the library let other threads run meanwhile
_IN_NO_VOCABULARY = "\U0010fffe"  # a noncharacter


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A special token in a text: its id and its characters."""

    id: int
    start: int
    end: int


class ControlTokens:
    def __init__(self, backend: Backend) -> None:
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._texts = {id: token.content for id, token in added.items() if token.special and token.content}
        reads_normalized = any(token.special and token.normalized for token in added.values())
        self._normalizer = backend.normalizer if reads_normalized else None
        self._finder = _finder(backend, [added[id] for id in sorted(added)])
        self._id_of = {self._finder.token_to_id(text): id for id, text in self._texts.items()}
        self._marks = frozenset(char for text in self._texts.values() for char in _marks(text))

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(self._texts)

    def prepare(self) -> None:
        """Build what `encode_around` needs in advance; a large vocabulary takes half a second."""
        assert self._unknown_ids is not None

    def marks_in(self, text: str) -> set[str]:
        """The characters of a text without which it cannot spell a special token, or the rest of one."""
        if self._normalizer is None:
            return {mark for mark in self._marks if mark in text}
        normalize = self._normalizer.normalize_str
        return {char for char in set(text) if not self._marks.isdisjoint(char + normalize(char))}

    def find(self, text: str) -> list[TextSpan]:
        """The special tokens that an encoding of the text would contain, in order."""
        found = _encode(self._finder, text)
        pairs = zip(found.ids, found.offsets, strict=True)
        return [TextSpan(self._id_of[id], *offsets) for id, offsets in pairs if id in self._id_of]

    def encode_around(self, text: str, spans: Sequence[TextSpan], originals: Mapping[int, str]) -> list[int]:
        """Encode the spans as special tokens, and the rest as plain text after `str.translate(originals)`."""
        ends = [0, *(span.end for span in spans)]
        starts = [*(span.start for span in spans), len(text)]
        pieces = [text[end:start].translate(originals) for end, start in zip(ends, starts, strict=True)]
        ids = self._encode_plain(pieces[0], is_first=True)
        for span, piece in zip(spans, pieces[1:], strict=True):
            ids += [span.id, *self._encode_plain(piece, is_first=False)]
        return ids

    def _encode_plain(self, text: str, *, is_first: bool) -> list[int]:
        """Encode a text as if it followed other text: some tokenizers put a space before the first one."""
        if not text:
            return []
        backend, anchor = self._plain
        ids = _encode(backend, text).ids if is_first else _encode(backend, anchor + text).ids[1:]
        return [id for each in ids for id in self._spelled(each)]

    def _spelled(self, id: int) -> Sequence[int]:
        """Replace special tokens that the model itself makes of plain text by tokens of their characters."""
        if id not in self._texts or id in self._unknown_ids:
            return (id,)
        return [part for char in self._texts[id] for part in self._char_ids(char)]

    def _char_ids(self, char: str) -> Iterator[int]:
        data = char.encode()
        as_bytes = [f"<0x{byte:02X}>" for byte in data], [CHAR_OF[byte] for byte in data]
        spellings = ([char], ["▁"] if char == " " else [char], *as_bytes)
        for tokens in spellings:
            ids = [self._backend.token_to_id(token) for token in tokens]
            if all(id is not None and id not in self._texts for id in ids):
                return iter(id for id in ids if id is not None)
        return iter(())

    @cached_property
    def _plain(self) -> tuple[Backend, str]:
        """A copy of the backend that reads special tokens as text, and a token that cannot be written."""
        backend = Backend.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        anchor = f"\ufdd0{secrets.token_hex(16)}"
        backend.add_tokens([AddedToken(anchor, special=False, normalized=False)])
        return backend, anchor

    @cached_property
    def _unknown_ids(self) -> frozenset[int]:
        """Special tokens that stand for text outside the vocabulary."""
        return self.ids.intersection(_encode(self._plain[0], _IN_NO_VOCABULARY).ids)


def _encode(backend: Backend, text: str) -> Encoding:
    if len(text) < LONG_TEXT:
        return backend.encode(text, add_special_tokens=False)
    return backend.encode_batch([text], add_special_tokens=False)[0]


def _finder(backend: Backend, added: Sequence[AddedToken]) -> Backend:
    """A tokenizer without words: its encodings hold only the added tokens."""
    finder = Backend(BPE())
    if backend.normalizer is not None and any(token.normalized for token in added):
        finder.normalizer = backend.normalizer
    finder.add_tokens(list(added))
    return finder


def _marks(text: str) -> str:
    """Characters of a special token that words do not have; its first character if it is a word itself."""
    return "".join(char for char in text if not (char.isalnum() or char == "_" or char.isspace())) or text[:1]
