"""Partners of conversations that say what a test tells them to."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gapless.chat.reply import ReplyEnd
from gapless.text.deltas import CallArguments, CallBegin, Content, ReplyDelta
from gapless.text.tools.base import Tool

Parts = list[ReplyDelta | ReplyEnd | Exception]
DONE = ReplyEnd("stop", 7, 3)


class ScriptedPartner:
    """Gives prepared answers, one after the other, and remembers what it was asked."""

    description = "a script, context of 100 tokens"

    def __init__(self, *answers: Parts, pause_s: float = 0.0) -> None:
        self._answers = list(answers)
        self._pause_s = pause_s
        self.asked: list[list[Mapping[str, Any]]] = []
        self.params: list[dict[str, Any]] = []
        self.num_closed = 0

    def answer(
        self, messages: Sequence[Mapping[str, Any]], params: Mapping[str, Any], tools: Sequence[Tool] = ()
    ) -> Iterator[ReplyDelta | ReplyEnd]:
        self.asked.append(copy.deepcopy(list(messages)))
        self.params.append(dict(params))
        try:
            for part in self._answers.pop(0):
                if isinstance(part, Exception):
                    raise part
                yield part
                time.sleep(self._pause_s)
        finally:
            self.num_closed += 1

    def close(self) -> None: ...


class ListedLines:
    """What a user types, known before."""

    def __init__(self, *lines: str) -> None:
        self._lines = list(lines)
        self.prompts: list[str] = []

    def read(self, prompt: str) -> str | None:
        self.prompts.append(prompt)
        return self._lines.pop(0) if self._lines else None


def said(*texts: str) -> Parts:
    """An answer of plain text."""
    return [*map(Content, texts), DONE]


def calls(*each: tuple[str, str, str]) -> Parts:
    """An answer of tool calls, each with id, name and arguments."""
    parts: Parts = []
    for index, (id, name, arguments) in enumerate(each):
        parts += [CallBegin(index, id, name), CallArguments(index, arguments)]
    return [*parts, ReplyEnd("tool_calls")]
