"""A model in this process as the partner of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gapless.chat.reply import ReplyEnd, ReplyPart
from gapless.chat.tool_file import ToolList
from gapless.core.limits import most_tokens
from gapless.core.params import SamplingParams
from gapless.errors import ConfigError, StepFailed
from gapless.llm import LLM


class LocalPartner:
    """Owns the model. An answer may fill the rest of the context unless `max_tokens` is given."""

    def __init__(self, llm: LLM, model: str) -> None:
        self._llm = llm
        self._model = model
        tokenizer = llm.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            llm.close()
            lacks = "tokenizer" if tokenizer is None else "chat template"
            advice = "choose a model that was trained on conversations, or continue plain text with `gapless generate`"
            raise ConfigError(f"{model} has no {lacks}, so it cannot chat; {advice}")

    @property
    def description(self) -> str:
        resolved = self._llm.engine.resolved
        return f"{self._model} on {resolved.device_name}, context of {most_tokens(resolved.limits)} tokens"

    def answer(
        self, messages: Sequence[Mapping[str, Any]], params: Mapping[str, Any], tools: ToolList
    ) -> Iterator[ReplyPart]:
        prompt = self._llm.encode_chat(messages)
        room = most_tokens(self._llm.engine.resolved.limits) - len(prompt)
        chosen = SamplingParams.from_dict({"max_tokens": max(room, 1), **params})
        for delta in self._llm.stream(prompt, chosen):
            end = None
            if (found := delta.completion) is not None:
                if found.error is not None:
                    raise StepFailed(found.error)
                end = ReplyEnd(found.finish_reason, len(prompt), len(found.token_ids))
            yield ReplyPart(text=delta.text, end=end)

    def close(self) -> None:
        self._llm.close()
