"""Chats of a batch between the row and the result: their tools, and how to read the reply to each.

Prompts, shapes and replies are made by the code of the server, so that a row means what it means there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gapless.errors import InvalidRequest
from gapless.formats.base import Line
from gapless.server.conversation import chat_talk, last_words
from gapless.server.demands import demanded
from gapless.server.errors import ApiError
from gapless.server.protocol import ChatRequest
from gapless.server.replies import ReplyPlan, ReplyPlanner, tell_message
from gapless.server.tools import chat_tools
from gapless.text.reply import find_reply_format
from gapless.text.tools.words import told_tools

if TYPE_CHECKING:  # it would load torch
    from gapless.client import Completion, Job
    from gapless.core.params import SamplingParams
    from gapless.llm import LLM
    from gapless.text.tokenizer import Tokenizer


class BatchChats:
    """The chats that run now."""

    def __init__(self) -> None:
        self._planner: ReplyPlanner | None = None
        self._plans: dict[int, ReplyPlan] = {}  # by the index of the line

    def job(self, llm: LLM, line: Line, body: ChatRequest, params: SamplingParams) -> Job:
        """Raises InvalidRequest."""
        if llm.tokenizer is None:
            return llm.prepare_chat(line.messages, params)  # which says what is missing
        try:
            return self._job(llm, llm.tokenizer, line, body, params)
        except ApiError as error:
            raise InvalidRequest(f"body.{error.message}" if error.param else error.message, error.param) from None

    def _job(self, llm: LLM, tokenizer: Tokenizer, line: Line, body: ChatRequest, params: SamplingParams) -> Job:
        if self._planner is None:
            self._planner = ReplyPlanner(tokenizer, find_reply_format(tokenizer))
        planner, template = self._planner, tokenizer.chat_template or ""
        toolbox = chat_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        talk, told = told_tools(chat_talk(body.messages, template), toolbox.offered, planner.format.tools, template)
        prompt = llm.encode_chat(talk, **line.template, **told)
        begun = last_words(body.messages) if body.continue_final_message else ""
        plan = planner.plan(toolbox, prompt, begun=begun, shows_reasoning=body.include_reasoning is not False)
        job = llm.prepare(prompt, demanded(plan, params), shown_ids=plan.shown)
        self._plans[line.index] = plan
        return job

    def take(self, line: Line) -> ReplyPlan:
        """How to read the replies of a line. It is over now."""
        return self._plans.pop(line.index)


def tell_reply(plan: ReplyPlan, choice: Completion) -> dict[str, Any]:
    """A choice as chats tell it: the message, and why it ended."""
    reply = plan.read_at_once(choice.text)
    reason = plan.toolbox.finish_reason(choice.finish_reason, len(reply.calls))
    return {"message": tell_message(reply, ""), "finish_reason": reason}


def num_reasoning_tokens(plan: ReplyPlan, completion: Completion, tokenizer: Tokenizer | None) -> int:
    """Of all choices."""
    counts = [(plan.reasoning_count(tokenizer), choice) for choice in completion.choices]
    return sum(count.of(choice.token_ids) for count, choice in counts if count is not None)
