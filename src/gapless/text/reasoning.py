"""Splits the reasoning off the beginning of a reply: `<think>...</think>answer`, in pieces.

A reply has one part of reasoning, and only at its beginning. A prompt may have opened it already. Spaces around the
reasoning belong to the format and are not shown. Also counts the tokens of that part. Does not know tools.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gapless.errors import ConfigError
from gapless.text.stop import open_start
from gapless.text.tokenizer import Tokenizer

TAG_TOKENS = 24  # most tokens of a tag, and of the spaces before it: one for each byte
AT_ONCE = 64  # tokens that are searched for the end of the reasoning together


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags of a model family."""

    name: str
    begin: str
    end: str

    def is_open(self, text: str) -> bool:
        """Whether a text ends inside of a reasoning part."""
        return text.rfind(self.begin) > text.rfind(self.end)


FORMATS = (
    ReasoningFormat("think", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("gemma", "<|channel>thought\n", "<channel|>"),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
    ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
)
NAMES = tuple(each.name for each in FORMATS)


def find_reasoning(
    template: str | None, has_token: Callable[[str], bool], name: str = "auto"
) -> ReasoningFormat | None:
    """The named format, or with "auto" the one whose tags the template or the vocabulary has. Raises ConfigError."""
    if name == "auto":
        return next((each for each in FORMATS if _fits(each, template or "", has_token)), None)
    found = next((each for each in FORMATS if each.name == name), None)
    if found is None and name != "none":
        raise ConfigError(f"reasoning_format must be one of auto, none, {', '.join(NAMES)}; got {name!r}")
    return found


def _fits(format: ReasoningFormat, template: str, has_token: Callable[[str], bool]) -> bool:
    return format.end in template or (has_token(format.begin) and has_token(format.end))


@dataclass(frozen=True, slots=True)
class Split:
    """Text of both kinds that became certain."""

    reasoning: str
    answer: str


class ReasoningSplitter:
    def __init__(self, format: ReasoningFormat, *, is_open: bool) -> None:
        self._format = format
        self._state = "inside" if is_open else "before"
        self._text = ""  # not decided yet
        self._has_reasoning = False

    def push(self, text: str) -> Split:
        if self._state == "answer":
            return Split("", text)
        self._text += text
        self._open()
        reasoning = self._read() if self._state == "inside" else ""
        if self._state == "after":
            self._text = self._text.lstrip()
            self._state = "answer" if self._text else "after"
        answer = ""
        if self._state == "answer":
            answer, self._text = self._text, ""
        return Split(reasoning, answer)

    def finish(self) -> Split:
        """The text ends: what was held back."""
        text, self._text = self._text, ""
        return Split(text.rstrip(), "") if self._state == "inside" else Split("", text)

    def _open(self) -> None:
        if self._state != "before":
            return
        text, begin = self._text.lstrip(), self._format.begin
        if text.startswith(begin):
            self._text, self._state = text[len(begin) :], "inside"
        elif text and not begin.startswith(text):
            self._state = "answer"

    def _read(self) -> str:
        """Reasoning that is certain. Spaces at its end are held back, because the end tag may follow."""
        if not self._has_reasoning:
            self._text = self._text.lstrip()
        found, end = self._text.find(self._format.end), self._format.end
        cut = found if found >= 0 else open_start(self._text, end)
        shown = self._text[:cut].rstrip()
        self._text = self._text[len(shown) :]
        if found >= 0:
            self._text, self._state = self._text.partition(end)[2], "after"
        self._has_reasoning = self._has_reasoning or bool(shown)
        return shown


class ReasoningCount:
    """How many tokens of one reply are reasoning, tags included. Reads each token once, however often it is asked."""

    def __init__(self, tokenizer: Tokenizer, format: ReasoningFormat, *, is_open: bool) -> None:
        self._tokenizer = tokenizer
        self._format = format
        self._is_open = is_open
        self._num_read = 0
        self._found: int | None = None  # the answer, once it is final

    def of(self, tokens: Sequence[int]) -> int:
        """Of the reply so far."""
        if not self._is_open:
            self._is_open = self._text(tokens[:TAG_TOKENS]).lstrip().startswith(self._format.begin)
        if not self._is_open:
            return 0
        while self._found is None and self._num_read < len(tokens):
            self._read(tokens)
        return len(tokens) if self._found is None else self._found

    def _read(self, tokens: Sequence[int]) -> None:
        """Look for the end in the next few tokens, and in those before them that may be the first part of its tag."""
        begin, end = max(self._num_read - TAG_TOKENS, 0), min(self._num_read + AT_ONCE, len(tokens))
        if self._format.end in self._text(tokens[begin:end]):
            bounds = range(self._num_read + 1, end + 1)
            self._found = next(bound for bound in bounds if self._format.end in self._text(tokens[begin:bound]))
        self._num_read = end

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)
