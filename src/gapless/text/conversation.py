"""Conversations to token ids. The text of messages never becomes a special token, unless the operator allows it.

A conversation is rendered as it is and, if it has characters of special tokens, once more with private-use characters
in their place. The special tokens of that disguised rendering are the template's own. Does not know how a template is
rendered (`chat`, `render_process`) or how special tokens are found (`control`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from gapless.errors import InvalidRequest, PromptTooLong
from gapless.text.chat import Conversation, check_messages
from gapless.text.control import ControlTokens
from gapless.text.tokenizer import CHARACTERS_A_TOKEN, Tokenizer, require_text

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


@dataclass(frozen=True, slots=True)
class Versions:
    """One conversation in several versions: as it is, and then with more and more characters replaced."""

    conversations: Sequence[Conversation]
    originals: Mapping[int, str]  # what each private-use character stands for; for str.translate


class ChatEncoder:
    def __init__(self, tokenizer: Tokenizer, *, allow_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._control = tokenizer.control
        self._allows_special = allow_special_tokens

    def versions(self, messages: object, most: int, extra: Mapping[str, Any]) -> Versions:
        """The versions to render. Raises InvalidRequest, also for messages too long for `most` tokens in every
        rendering.
        """
        try:
            return self._versions(Conversation(check_messages(messages), extra), most)
        except RecursionError:
            raise InvalidRequest("the messages are nested too deeply", "messages") from None

    def _versions(self, plain: Conversation, most: int) -> Versions:
        texts = list(strings([plain.messages, plain.extra]))
        if sum(map(len, texts)) > most * CHARACTERS_A_TOKEN:
            raise PromptTooLong(most, f"more than {most * CHARACTERS_A_TOKEN} characters")
        marks = set[str]() if self._allows_special else set[str]().union(*map(self._control.marks_in, texts))
        if not marks:
            return Versions([plain], {})
        stand_ins = dict(zip(sorted(marks), _unused([*texts, self._tokenizer.chat_template or ""]), strict=False))
        if len(stand_ins) < len(marks):
            raise InvalidRequest("the messages use every private-use character of Unicode; leave some out", "messages")
        table = str.maketrans(stand_ins)
        disguised = _mapped(plain, lambda text: text.translate(table))
        between = []
        require_text(everything := "\n".join(texts))
        if self._control.find(everything):
            between = [_mapped(plain, lambda text: _disguise_tokens(text, table, self._control))]
        return Versions([plain, *between, disguised], {ord(new): old for old, new in stand_ins.items()})

    def tokens(self, versions: Versions, texts: Sequence[str | None], most: int) -> list[int]:
        """Ids of the most faithful rendering in which all special tokens are the template's. Raises InvalidRequest."""
        plain, disguised = texts[0], texts[-1]
        assert plain is not None
        if disguised is None:
            raise InvalidRequest(
                "the chat template needs special tokens in the messages, which are not allowed", "messages"
            )
        self._tokenizer.check_length(plain, most)
        if len(texts) == 1:
            return self._tokenizer.encode(plain, add_special_tokens=False)
        own = [span.id for span in self._control.find(disguised)]
        rendered = ((text, self._control.find(text)) for text in texts if text is not None)
        text, spans = next(each for each in rendered if [span.id for span in each[1]] == own)
        if text is plain:
            return self._tokenizer.encode(plain, add_special_tokens=False)
        self._tokenizer.check_length(text, most)
        return self._control.encode_around(text, spans, versions.originals)


def _disguise_tokens(text: str, table: Mapping[int, str], control: ControlTokens) -> str:
    """Replace only the special tokens that a text spells out, so templates still find other text they look for."""
    end, pieces = 0, []
    for span in control.find(text):
        pieces += [text[end : span.start], text[span.start : span.end].translate(table)]
        end = span.end
    return "".join([*pieces, text[end:]])


def strings(value: object) -> Iterator[str]:
    """All text in a value, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(strings, chain(value.keys(), value.values())))
    elif isinstance(value, Sequence):
        yield from chain.from_iterable(map(strings, value))


def _mapped(conversation: Conversation, change: Callable[[str], str]) -> Conversation:
    def mapped(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, Mapping):
            return {mapped(key): mapped(item) for key, item in value.items()}
        return [mapped(item) for item in value] if isinstance(value, Sequence) else value

    return Conversation(mapped(conversation.messages), mapped(conversation.extra))


def _unused(texts: Iterable[str]) -> Iterator[str]:
    """Private-use characters that do not occur in the texts."""
    used = set("".join(texts))
    return (char for char in map(chr, chain(*_PRIVATE_USE)) if char not in used)
