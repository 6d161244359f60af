"""A model in this process as the partner of a conversation."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from gapless.chat.reply import ReplyEnd
from gapless.core.limits import most_tokens
from gapless.core.params import SamplingParams
from gapless.errors import ConfigError, InvalidRequest, StepFailed
from gapless.llm import LLM
from gapless.text.deltas import DeltaParser, ReplyDelta
from gapless.text.reply import PlainParser, find_reply_format
from gapless.text.tools.base import Tool
from gapless.text.tools.demand import Demand, reply_shape
from gapless.text.tools.words import told_tools


class LocalPartner:
    """Owns the model. An answer may fill the rest of the context unless `max_tokens` is given."""

    def __init__(self, llm: LLM, model: str, *, tool_format: str = "auto", reasoning_format: str = "auto") -> None:
        self._llm = llm
        self._model = model
        tokenizer = llm.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            llm.close()
            lacks = "tokenizer" if tokenizer is None else "chat template"
            advice = "choose a model that was trained on conversations, or continue plain text with `gapless generate`"
            raise ConfigError(f"{model} has no {lacks}, so it cannot chat; {advice}")
        self._tokenizer = tokenizer
        self._template = tokenizer.chat_template
        self._format = find_reply_format(tokenizer, tool_format, reasoning_format)

    @property
    def description(self) -> str:
        resolved = self._llm.engine.resolved
        return f"{self._model} on {resolved.device_name}, context of {most_tokens(resolved.limits)} tokens"

    def answer(
        self, messages: Sequence[Mapping[str, Any]], params: Mapping[str, Any], tools: Sequence[Tool]
    ) -> Iterator[ReplyDelta | ReplyEnd]:
        talk, values = told_tools(_for_templates(messages), tools, self._format.tools, self._template)
        prompt = self._llm.encode_chat(talk, **values)
        room = most_tokens(self._llm.engine.resolved.limits) - len(prompt)
        is_reasoning = self._format.is_reasoning(self._tokenizer, prompt)
        chosen = SamplingParams.from_dict({"max_tokens": max(room, 1), **self._shape(tools, is_reasoning), **params})
        parser, shown = self._parser(params, tools, is_reasoning=is_reasoning)
        for delta in self._llm.stream(prompt, chosen, shown_ids=shown):
            yield from parser.push(delta.text)
            if (found := delta.completion) is not None:
                if found.error is not None:
                    raise StepFailed(found.error)
                yield from parser.finish()
                yield ReplyEnd(found.finish_reason, len(prompt), len(found.token_ids))

    def _shape(self, tools: Sequence[Tool], is_reasoning: bool) -> dict[str, Any]:
        """What strict tools demand of the reply, as a sampling parameter."""
        if not any(tool.strict for tool in tools):
            return {}
        demand = Demand(tools, is_required=False, is_parallel=True, enforces_all=False)
        shape = reply_shape(self._format.tools, demand, self._format.reasoning, is_reasoning=is_reasoning)
        return {"structured": {"structural_tag": {"format": shape}}}

    def _parser(
        self, params: Mapping[str, Any], tools: Sequence[Tool], *, is_reasoning: bool
    ) -> tuple[DeltaParser, Collection[int]]:
        """How to read the reply, and the special tokens that this needs to see. Raises InvalidRequest."""
        if params.get("structured") is None:
            parser = self._format.parser(tools, is_reasoning=is_reasoning)
            return parser, self._format.shown_ids(self._tokenizer, with_tools=bool(tools))
        if tools:
            raise InvalidRequest("structured and tools do not go together with a local model", "structured")
        return PlainParser(), ()  # the shape begins with the first token, so there is no reasoning before it

    def close(self) -> None:
        self._llm.close()


def _for_templates(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: arguments of calls as objects, and with each result the name of its tool."""
    names: dict[str, str] = {}
    talk = [dict(message) for message in messages]
    for message in talk:
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_call_for_templates(call) for call in calls]
            names |= {call["id"]: call["function"]["name"] for call in calls}
        if message["role"] == "tool":
            message.setdefault("name", names.get(str(message.get("tool_call_id")), ""))
    return talk


def _call_for_templates(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
