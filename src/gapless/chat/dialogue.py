"""The conversation so far: system message and turns, saved as a line of a prompt file.

Owns which messages the next answer is given for. Knows no terminal, and not who answers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gapless.core.params import SamplingParams
from gapless.errors import InvalidRequest, OutputError
from gapless.formats.base import BadLine
from gapless.prompt_file import read_prompts
from gapless.text.chat import check_messages

MAX_FILE_BYTES = 64 * 2**20


class Dialogue:
    """One conversation. Its turns end with a whole answer, or with a question that is being answered."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[dict[str, Any]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages, the system's first."""
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*head, *self.turns]

    def add(self, message: dict[str, Any]) -> None:
        self.turns.append(message)

    def forget(self) -> None:
        """Begin again; the system message stays."""
        self.turns.clear()

    def take_back_answer(self) -> bool:
        """Remove all that came after the last question; False when there is none."""
        start = self._last_question()
        if start is None:
            return False
        del self.turns[start + 1 :]
        return True

    def take_back_question(self) -> bool:
        """Remove the last question with its answer; False when there is none."""
        start = self._last_question()
        if start is None:
            return False
        del self.turns[start:]
        return True

    def _last_question(self) -> int | None:
        places = [index for index, turn in enumerate(self.turns) if turn["role"] == "user"]
        return places[-1] if places else None


def save(path: str, dialogue: Dialogue, params: Mapping[str, Any]) -> Path:
    """Write a conversation and its sampling parameters. Raises OutputError, and InvalidRequest for an empty one."""
    if not dialogue.messages:
        raise InvalidRequest("there is nothing to save yet")
    place = Path(os.path.expanduser(path))
    line = json.dumps({"messages": dialogue.messages, **params}, ensure_ascii=False)
    beside = place.with_name(place.name + ".new")  # a full disk must not cost the conversation saved before
    try:
        beside.write_text(line + "\n", encoding="utf-8", errors="backslashreplace")
        beside.replace(place)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from None
    return place


def load(path: str) -> tuple[Dialogue, dict[str, Any]]:
    """Read a conversation back, with its sampling parameters. Raises InvalidRequest."""
    place = os.path.expanduser(path)
    if os.path.exists(place) and (not os.path.isfile(place) or os.path.getsize(place) > MAX_FILE_BYTES):
        raise InvalidRequest(f"{path}: is not a file of at most {MAX_FILE_BYTES >> 20} MiB")
    with open(os.devnull, "rb") as nothing:
        lines = list(read_prompts([os.path.abspath(place)], nothing).lines())
    line = lines[0]
    if len(lines) > 1:
        raise InvalidRequest(f"{path}: has {len(lines)} lines; a conversation is one line with messages")
    if isinstance(line, BadLine):
        raise InvalidRequest(f"{path}: {line.error}")
    if line.messages is None:
        raise InvalidRequest(f"{path}: has a prompt; a conversation has messages")
    messages = check_messages(line.messages)
    SamplingParams.from_dict(line.params)
    has_system = messages[0]["role"] == "system"
    dialogue = Dialogue(messages[0]["content"] if has_system else None)
    dialogue.turns = messages[has_system:]
    return dialogue, dict(line.params)
