"""A conversation going on: reads what the user says, has it answered, shows the answer.

Owns the conversation's state: messages, sampling parameters, figures of the last answer. Commands change it
(`orders`). A mistake is told, and the conversation goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from gapless.chat import orders
from gapless.chat.dialogue import Dialogue
from gapless.chat.interrupts import Interrupts, Stopped
from gapless.chat.lines import LineSource, read_message
from gapless.chat.reply import Partner, ReplyEnd, as_message, is_whole
from gapless.chat.screen import Screen
from gapless.core.params import SamplingParams
from gapless.errors import EngineClosed, GaplessError, InvalidRequest, PromptTooLong
from gapless.text.deltas import ReplyDelta, ToolCall, WholeReply
from gapless.text.tools.base import Tool

PROMPT = "> "


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """Sizes and times of one answer."""

    num_prompt: int | None
    num_tokens: int | None
    first_s: float
    whole_s: float

    def __str__(self) -> str:
        parts = [] if self.num_prompt is None else [f"{self.num_prompt} tokens of conversation"]
        parts += [] if self.num_tokens is None else [f"{self.num_tokens} tokens of answer"]
        parts.append(f"first after {1000 * self.first_s:.0f} ms")
        if self.num_tokens is not None and self.num_tokens > 1:
            parts.append(f"{(self.num_tokens - 1) / max(self.whole_s - self.first_s, 1e-6):.1f} tokens/s")
        return ", ".join(parts)


class Session:
    """One conversation with one partner."""

    def __init__(
        self,
        partner: Partner,
        lines: LineSource,
        screen: Screen,
        dialogue: Dialogue,
        params: dict[str, Any],
        tools: Sequence[Tool] = (),
    ) -> None:
        self.partner = partner
        self.screen = screen
        self.dialogue = dialogue
        self.params = params
        self.tools = tools
        self.figures: AnswerFigures | None = None
        self.num_errors = 0
        self._lines = lines
        self._interrupts = Interrupts()
        self._is_over = False

    def run(self, *, stoppable: bool) -> None:
        """Talk until the input or the user ends it. `stoppable`: Ctrl-C stops an answer, not the program."""
        if not stoppable:
            self._talk()
            return
        with self._interrupts.handled():
            self._talk()

    def set_params(self, params: dict[str, Any]) -> None:
        """Use these from now on. Raises InvalidRequest."""
        check_params(params)
        self.params = params

    def leave(self) -> None:
        self._is_over = True

    def answer(self) -> None:
        """Have the last message answered, and tools used on the way. Raises GaplessError.

        A question that cannot be answered is taken back.
        """
        try:
            while calls := self._hear():
                self._give_results(calls)
        except (GaplessError, Stopped):
            self.screen.close_line()
            self.dialogue.take_back_question()
            raise

    def _hear(self) -> list[ToolCall]:
        """Show an answer and remember it; returns its tool calls."""
        reply = WholeReply()
        try:
            end = self._listen(reply)
        except Stopped:
            self._stop(reply)
            return []
        if not all(is_whole(call) for call in reply.calls):
            raise InvalidRequest("the arguments of a tool call are no JSON object; raise max_tokens if they were cut")
        if end is not None and end.reason == "length":
            self.screen.note("(cut: the answer reached max_tokens, or the end of the context)")
        self.dialogue.add(as_message(reply))
        return reply.calls

    def _give_results(self, calls: Sequence[ToolCall]) -> None:
        """Ask the user what each call returns. Raises Stopped, which takes the question back."""
        for call in calls:
            with self._interrupts.stoppable():
                result = read_message(self._lines, f"result of {call.name}> ")
            if result is None:
                self.leave()
                raise InvalidRequest(f"the input ended before the result of {call.name}")
            self.dialogue.add({"role": "tool", "tool_call_id": call.id, "content": result})

    def _stop(self, reply: WholeReply) -> None:
        """Keep what was said so far; a question of which nothing was answered is as if it had not been asked."""
        self.screen.close_line()
        if reply.content:
            self.dialogue.add({"role": "assistant", "content": reply.content})
            self.screen.note("(stopped)")
        else:
            self.dialogue.take_back_question()
            self.screen.note("(stopped; the question is taken back)")

    def _talk(self) -> None:
        while not self._is_over:
            try:
                with self._interrupts.stoppable():
                    message = read_message(self._lines, PROMPT)
                if message is None:
                    return
                self._take(message)
            except Stopped:
                self.screen.tell("")
                self.screen.note("(Ctrl-D or /exit leaves)")
            except EngineClosed:
                raise
            except GaplessError as error:
                self.num_errors += 1
                self.screen.error(_advised(error))

    def _take(self, message: str) -> None:
        if not message.strip():
            return
        if message.startswith("/") and not message.startswith("//"):
            orders.obey(self, message)
            return
        self.dialogue.add({"role": "user", "content": message.removeprefix("/")})
        self.answer()

    def _listen(self, reply: WholeReply) -> ReplyEnd | None:
        """Show an answer as it comes. Returns how it ended, if the partner says so."""
        begun = time.perf_counter()
        first = end = None
        with self._interrupts.stoppable(), contextlib.closing(self._parts()) as parts:
            for part in parts:
                first = first or time.perf_counter()
                if isinstance(part, ReplyEnd):
                    end = part
                else:
                    reply.add([part])
                    self.screen.show(part)
        self.screen.close_line()
        now = time.perf_counter()
        sizes = (None, None) if end is None else (end.num_prompt, end.num_tokens)
        self.figures = AnswerFigures(*sizes, (first or now) - begun, now - begun)
        return end

    def _parts(self) -> Generator[ReplyDelta | ReplyEnd]:
        yield from self.partner.answer(self.dialogue.messages, self.params, self.tools)


def check_params(params: dict[str, Any]) -> None:
    """Raise InvalidRequest for what no answer of a conversation can have."""
    checked = SamplingParams.from_dict(params)
    for name in ("n", "best_of"):
        if getattr(checked, name) not in (None, 1):
            raise InvalidRequest(f"{name} must be 1: a conversation has one answer, and /retry gives another", name)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(checked, name) is not None:
            raise InvalidRequest(f"{name} is not shown in a conversation", name)


def _advised(error: GaplessError) -> str:
    advice = " /undo takes the last exchange back, /clear begins again." if isinstance(error, PromptTooLong) else ""
    return f"{error}{advice}"
