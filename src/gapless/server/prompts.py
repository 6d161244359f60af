"""Texts and conversations to prompts: the tokenizer and the chat template, as a service that never blocks for long.

Long texts are tokenized in a thread, huge ones not too many at the same time, and templates run in processes of their
own. Also knows the form of the model's replies. Knows no requests and no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gapless.server.conversation import Talk, chat_talk
from gapless.server.errors import ApiError, refused
from gapless.server.protocol import MessageBody
from gapless.server.render_pool import RenderPool
from gapless.server.replies import ReplyPlan, ReplyPlanner
from gapless.server.tools import Toolbox
from gapless.text.control import LONG_TEXT
from gapless.text.conversation import ChatEncoder, Versions
from gapless.text.render_process import RenderProcess
from gapless.text.reply import ReplyFormat
from gapless.text.tokenizer import HUGE_TEXT, Tokenizer
from gapless.text.tools.base import Tool, reads
from gapless.text.tools.words import told_tools

NUM_HUGE_TEXTS = 2  # tokenized at the same time: each takes hundreds of bytes a character
# Values that a template gets from elsewhere.
OWN_VALUES = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("bos_token", "eos_token", "self", "raise_exception", "strftime_now"),
    )
)


class PromptWriter:
    """Without a tokenizer every text is refused."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        renderer: RenderPool,
        reply: ReplyFormat | None,
        most: Callable[[], int],
        *,
        allow_special_tokens: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._replies = ReplyPlanner(tokenizer, reply) if tokenizer is not None and reply is not None else None
        self._most = most  # tokens that a prompt may have; raises ApiError while that is not known
        self._chats = ChatEncoder(tokenizer, allow_special_tokens=allow_special_tokens) if tokenizer else None
        self._huge_texts = asyncio.Semaphore(NUM_HUGE_TEXTS)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ApiError if there is none."""
        if self._tokenizer is None:
            raise ApiError(400, "the model has no tokenizer; send a completion request with token ids")
        return self._tokenizer

    @property
    def reply(self) -> ReplyFormat:
        """The form of the model's replies. Raises ApiError if there is no tokenizer."""
        return self._planner.format

    @property
    def _planner(self) -> ReplyPlanner:
        assert self.tokenizer is not None
        assert self._replies is not None
        return self._replies

    @property
    def template(self) -> str:
        """The text of the chat template; empty if there is none."""
        return (self._tokenizer.chat_template if self._tokenizer is not None else None) or ""

    async def encode(self, text: str, *, param: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises ApiError."""
        tokenizer, most = self.tokenizer, self._most()

        def tokens() -> list[int]:
            tokenizer.check_length(text, most)
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await self._tokenize(tokens, len(text), param)

    async def _tokenize(self, tokens: Callable[[], list[int]], num_chars: int, param: str) -> list[int]:
        """Call where others do not wait for it, and not for too many huge texts at the same time."""
        with refused(param):
            if num_chars < LONG_TEXT:  # a thread would take longer
                return tokens()
            async with self._huge_texts if num_chars > HUGE_TEXT else contextlib.nullcontext():
                return await asyncio.to_thread(tokens)

    def chat_messages(self, messages: Sequence[MessageBody]) -> Talk:
        """Messages as the template expects them. Raises ApiError."""
        return chat_talk(messages, self.template)

    def template_values(self, given: Mapping[str, Any] | None, param: str) -> dict[str, Any]:
        """Further values for the template, by the client's wish. Raises ApiError for one that nobody would read."""
        for name, value in (given or {}).items():
            place = f"{param}.{name}"
            if name in OWN_VALUES:
                raise ApiError(400, f"{place} has a parameter of its own, or is not supported", param=place)
            if value and not reads(self.template, name):
                message = f"{place} is not supported: the model's chat template does not use it"
                raise ApiError(400, message, param=place, code="unsupported_parameter")
        return dict(given or {})

    def reasoning_effort(self, effort: str, param: str) -> dict[str, str]:
        """The value for the template. Raises ApiError if it does not read it."""
        if not reads(self.template, "reasoning_effort"):
            message = f"{param} is not supported: the model's chat template does not use it"
            raise ApiError(400, message, param=param, code="unsupported_parameter")
        return {"reasoning_effort": effort}

    def plan_reply(
        self, toolbox: Toolbox, prompt: Sequence[int], *, begun: str = "", shows_reasoning: bool = True
    ) -> ReplyPlan:
        """How to read the replies to a prompt. begun: the part of the reply that the prompt has already."""
        return self._planner.plan(toolbox, prompt, begun=begun, shows_reasoning=shows_reasoning)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        param: str = "messages",
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        values: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn. Raises ApiError.

        values: further ones for the template.
        """
        talk, told = told_tools(messages, tools, self.reply.tools, self.template)
        chats, most = self._chats, self._most()
        assert chats is not None
        turn = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}

        def render(process: RenderProcess) -> tuple[Versions, list[str | None]]:
            versions = chats.versions(talk, most, {**(values or {}), **told, **turn})
            return versions, process.render(versions.conversations)

        with refused(param):
            versions, texts = await self._renderer.run(render)
        return await self._tokenize(lambda: chats.tokens(versions, texts, most), len(texts[0] or ""), param)

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special ones included. Raises ApiError."""
        tokenizer = self.tokenizer
        if len(tokens) < LONG_TEXT:
            return tokenizer.decode(tokens, skip_special_tokens=False)
        return await asyncio.to_thread(tokenizer.decode, tokens, skip_special_tokens=False)
