"""Our own rows: `prompt` or `messages`, an `id`, and sampling parameters by their names. Results have the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.outcome import TokenLogprob
from gapless.formats.base import BadLine, Columns, Line, Row
from gapless.part_file import Record

if TYPE_CHECKING:  # it would load torch
    from gapless.client import Completion, Job
    from gapless.core.params import SamplingParams
    from gapless.llm import LLM
    from gapless.text.tokenizer import Tokenizer

COLUMNS: Columns = {
    "index": "number",
    "id": "text",
    "text": "text",
    "token_ids": "ids",
    "finish_reason": "text",
    "logprobs": "json",
    "choices": "json",
    "num_prompt_tokens": "number",
    "num_tokens": "number",
    "prompt_logprobs": "json",
    "error": "text",
}


class PlainRows:
    """The dialect."""

    columns = COLUMNS
    has_index = True
    has_unique_ids = False

    def __init__(self, *, token_ids: bool = False) -> None:
        self._token_ids = token_ids  # results tell the generated token ids too

    def parse(self, row: Row, index: int) -> Line | BadLine:
        value = row.value
        if row.error is not None:
            return BadLine(index, index, f"{row.place}: {row.error}")
        if not isinstance(value, dict):
            return BadLine(index, index, f"{row.place}: must be an object, got {type(value).__name__}")
        given = value.pop("id", None)
        name = index if given is None else given
        if not isinstance(name, (str, int)) or isinstance(name, bool):
            return BadLine(index, index, f"{row.place}: id must be text or a whole number, got {name!r}")
        if ("prompt" in value) == ("messages" in value):
            return BadLine(index, name, f"{row.place}: needs either 'prompt' or 'messages'")
        return Line(index, name, value.pop("prompt", None), value.pop("messages", None), value)

    def job(self, llm: LLM, line: Line, params: SamplingParams) -> Job:
        if line.messages is not None:
            return llm.prepare_chat(line.messages, params, **line.template)
        return llm.prepare(line.prompt, params)

    def result(self, line: Line, completion: Completion, tokenizer: Tokenizer | None) -> Record:
        """If one of its choices failed, the prompt failed.

        A single choice stands in the record itself, several as a list; `num_tokens` counts the tokens of all of them.
        """
        if completion.failure is not None:
            return self.error(line, completion.failure)
        choices = [self._choice(choice) for choice in completion.choices]
        record: Record = {"index": line.index, "id": line.id}
        record |= choices[0] if len(choices) == 1 else {"choices": choices}
        record["num_prompt_tokens"] = len(completion.prompt_token_ids)
        record["num_tokens"] = sum(len(choice.token_ids) for choice in completion.choices)
        if completion.prompt_logprobs is not None:
            record["prompt_logprobs"] = [_logprob(item) for item in completion.prompt_logprobs]
        return record

    def error(self, line: Line | BadLine, message: str) -> Record:
        return {"index": line.index, "id": line.id, "error": message}

    def _choice(self, choice: Completion) -> Record:
        record: Record = {"text": choice.text}
        if self._token_ids:
            record["token_ids"] = list(choice.token_ids)
        record["finish_reason"] = choice.finish_reason
        if choice.logprobs is not None:
            record["logprobs"] = [_logprob(item) for item in choice.logprobs]
        return record


def _logprob(item: TokenLogprob | None) -> Record | None:
    if item is None:
        return None
    return {"token": item.token, "logprob": item.logprob, "rank": item.rank, "top": item.top}
