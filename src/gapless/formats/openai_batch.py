"""The batch format of OpenAI: `custom_id`, `method`, `url` and `body` in, `custom_id`, `response` and `error` out.

Bodies are those of /v1/completions and /v1/chat/completions, read by the types and rules of the server. What a file
cannot have, such as a stream, is refused by name. Ids are made from the run and the row, so that a resumed run writes
the ids that an undisturbed one writes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from gapless.errors import InvalidRequest
from gapless.formats.base import BadLine, Columns, Line, Row
from gapless.formats.batch_chats import BatchChats, num_reasoning_tokens, tell_reply
from gapless.part_file import Record
from gapless.server.completions import DEFAULT_MAX_TOKENS
from gapless.server.conversation import chat_talk
from gapless.server.errors import ApiError, error_body, first_finding
from gapless.server.logprobs import (
    TokenTexts,
    prompt_starts,
    tell_completion_logprobs,
    tell_logprobs,
    tell_prompt_logprobs,
)
from gapless.server.messages import pack_scores
from gapless.server.neutral import refuse_unsupported
from gapless.server.options import ServerOptions
from gapless.server.prompts import OWN_VALUES
from gapless.server.protocol import ChatRequest, CompletionRequest
from gapless.server.service import SHARED
from gapless.server.shapes import shape_of

if TYPE_CHECKING:  # it would load torch
    from gapless.client import Completion, Job
    from gapless.core.params import SamplingParams
    from gapless.llm import LLM
    from gapless.server.replies import ReplyPlan
    from gapless.text.tokenizer import Tokenizer

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FIELDS = ("custom_id", "method", "url", "body")
COLUMNS: Columns = {"id": "text", "custom_id": "text", "response": "json", "error": "json"}
NOT_IN_FILES = ("stream", "stream_options", "echo", "timeout")  # of a body
BatchBody = ChatRequest | CompletionRequest


class BatchRows:
    """The dialect."""

    columns = COLUMNS
    has_index = False
    has_unique_ids = True

    def __init__(self, names: Collection[str], run: str) -> None:
        self._names = names  # of the model, in bodies
        self._run = run
        self._texts: dict[bool, TokenTexts] = {}
        self._chats = BatchChats()

    def parse(self, row: Row, index: int) -> Line | BadLine:
        value = row.value if isinstance(row.value, Mapping) else {}
        name = value.get("custom_id")
        id = name if isinstance(name, str) else index
        try:
            if row.error is not None:
                raise InvalidRequest(row.error)
            return self._line(index, _checked(row.value))
        except ValidationError as error:
            place, text = first_finding(error.errors(include_url=False))
            where = ".".join(str(part) for part in place)
            return BadLine(index, id, f"{row.place}: body.{where}: {text}")
        except (InvalidRequest, ApiError) as error:
            return BadLine(index, id, f"{row.place}: {error}")

    def _line(self, index: int, value: Mapping[str, Any]) -> Line:
        name, given = value["custom_id"], value["body"]
        if value["url"] == CHATS:
            return self._chat(index, name, ChatRequest.model_validate(given))
        return self._completion(index, name, CompletionRequest.model_validate(given))

    def _completion(self, index: int, name: str, body: CompletionRequest) -> Line:
        self._check(body)
        prompt = body.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            raise InvalidRequest("body.prompt has several prompts; give each a row of its own")
        if body.max_tokens == 0:
            raise InvalidRequest("body.max_tokens must be at least 1")
        params = _params(body) | _given(logprobs=body.logprobs, max_tokens=body.max_tokens)
        return Line(index, name, prompt, None, params, defaults={"max_tokens": DEFAULT_MAX_TOKENS}, origin=body)

    def _chat(self, index: int, name: str, body: ChatRequest) -> Line:
        self._check(body)
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("body.top_logprobs needs logprobs to be true")
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise InvalidRequest("body.max_tokens and max_completion_tokens differ; give one")
        talk = chat_talk(body.messages, "")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = _params(body) | _given(logprobs=logprobs, max_tokens=body.max_completion_tokens or body.max_tokens)
        defaults = {"max_tokens": ServerOptions().default_limit}
        return Line(index, name, None, talk, params, _template(body), defaults, body)

    def _check(self, body: BatchBody) -> None:
        for field in NOT_IN_FILES:
            if getattr(body, field, None):
                raise InvalidRequest(f"body.{field} is not supported in files")
        if body.model is not None and body.model not in self._names:
            known = " or ".join(repr(name) for name in self._names)
            raise InvalidRequest(f"body.model: this run has {known}, not {body.model!r}; see --served-model-name")
        refuse_unsupported(body)

    def job(self, llm: LLM, line: Line, params: SamplingParams) -> Job:
        body: BatchBody = line.origin
        if isinstance(body, ChatRequest):
            return self._chats.job(llm, line, body, params)
        return llm.prepare(line.prompt, params)

    # -- results -----------------------------------------------------------------------------------------------------

    def result(self, line: Line, completion: Completion, tokenizer: Tokenizer | None) -> Record:
        body: BatchBody = line.origin
        plan = self._chats.take(line) if isinstance(body, ChatRequest) else None
        if completion.failure is not None:
            return self._failed(line, 500, completion.failure)
        texts = self._token_texts(tokenizer, by_id=bool(body.return_tokens_as_token_ids))
        told: dict[str, Any] = {
            "id": f"{'cmpl' if plan is None else 'chatcmpl'}-{self._run}{line.index:08x}",
            "object": "text_completion" if plan is None else "chat.completion",
            "created": int(time.time()),
            "model": body.model or next(iter(self._names)),
            "choices": [_choice(number, each, body, texts, plan) for number, each in enumerate(completion.choices)],
            "usage": _usage(completion),
        }
        if plan is not None:
            num_reasoning = num_reasoning_tokens(plan, completion, tokenizer)
            told["usage"]["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        if body.prompt_logprobs is not None:
            packed = [pack_scores(completion.prompt_logprobs or ())]
            told["prompt_logprobs"] = asyncio.run(tell_prompt_logprobs(texts, packed, body.prompt_logprobs))
        if body.return_token_ids:
            told["prompt_token_ids"] = list(completion.prompt_token_ids)
        return self._record(line, 200, told, None)

    def error(self, line: Line | BadLine, message: str) -> Record:
        return self._failed(line, 400, message)

    def _failed(self, line: Line | BadLine, status: int, message: str) -> Record:
        """The error stands twice: as the server would answer, and where readers of batches look first."""
        body = error_body(status, message)
        return self._record(line, status, body, {"code": body["error"]["type"], "message": message})

    def _record(self, line: Line | BadLine, status: int, body: Any, error: Any) -> Record:
        number = f"{self._run}{line.index:08x}"
        return {
            "index": line.index,
            "id": f"batch_req_{number}",
            "custom_id": line.id if isinstance(line.id, str) else None,
            "response": {"status_code": status, "request_id": f"req_{number}", "body": body},
            "error": error,
        }

    def _token_texts(self, tokenizer: Tokenizer | None, *, by_id: bool) -> TokenTexts:
        if by_id not in self._texts:
            self._texts[by_id] = TokenTexts(tokenizer, by_id=by_id)
        return self._texts[by_id]


def _checked(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"must be an object, got {type(value).__name__}")
    for field in FIELDS:
        if field not in value:
            raise InvalidRequest(f"needs {field!r}, as every row of a batch")
    if unknown := [name for name in value if name not in FIELDS]:
        raise InvalidRequest(f"a row of a batch has no {unknown[0]!r}")
    if not isinstance(value["custom_id"], str):
        raise InvalidRequest(f"custom_id must be text, got {value['custom_id']!r:.60}")
    if value["method"] != "POST":
        raise InvalidRequest(f"method must be 'POST', got {value['method']!r:.60}")
    if value["url"] not in (CHATS, COMPLETIONS):
        raise InvalidRequest(f"url must be {CHATS!r} or {COMPLETIONS!r}, got {value['url']!r:.60}")
    return value


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _params(body: BatchBody) -> dict[str, Any]:
    """Parameters that have the same meaning in all bodies."""
    found = _given(
        **{name: getattr(body, name) for name in SHARED},
        n=body.n,
        best_of=body.best_of,
        stop=body.stop,
        prompt_logprobs=body.prompt_logprobs,
        structured=shape_of(body),
    )
    return found | ({"top_k": 0} if found.get("top_k") == -1 else {})


def _template(body: ChatRequest) -> dict[str, Any]:
    """Values for the chat template. Raises InvalidRequest."""
    values = dict(body.chat_template_kwargs or {})
    for name in values:
        if name in OWN_VALUES:
            raise InvalidRequest(f"body.chat_template_kwargs.{name} has a parameter of its own, or is not supported")
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest("body.continue_final_message and add_generation_prompt exclude each other")
    begins = False if body.continue_final_message else body.add_generation_prompt
    return values | _given(
        reasoning_effort=body.reasoning_effort,
        continue_final_message=body.continue_final_message,
        add_generation_prompt=begins,
    )


def _choice(
    number: int, choice: Completion, body: BatchBody, texts: TokenTexts, plan: ReplyPlan | None
) -> dict[str, Any]:
    told: dict[str, Any] = {"index": number, "logprobs": _logprobs(choice, body, texts)}
    if plan is None:
        told |= {"text": choice.text, "finish_reason": choice.finish_reason}
    else:
        told |= tell_reply(plan, choice)
    return told | {"token_ids": list(choice.token_ids)} if body.return_token_ids else told


def _logprobs(choice: Completion, body: BatchBody, texts: TokenTexts) -> dict[str, Any] | None:
    if choice.logprobs is None or body.logprobs in (None, False):
        return None
    packed = [pack_scores(choice.logprobs)]
    if isinstance(body, ChatRequest):
        return {"content": asyncio.run(tell_logprobs(texts, packed)), "refusal": None}
    starts = asyncio.run(prompt_starts(texts.tokenizer, choice.token_ids))
    starts = [min(start, len(choice.text)) for start in starts]
    count = body.logprobs or 0
    return asyncio.run(tell_completion_logprobs(texts, choice.token_ids, packed, starts, count))


def _usage(completion: Completion) -> dict[str, Any]:
    num_prompt = len(completion.prompt_token_ids)
    num_output = sum(len(choice.token_ids) for choice in completion.choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": completion.num_cached_tokens},
    }
