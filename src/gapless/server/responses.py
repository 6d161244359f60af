"""`/v1/responses`: a turn of a conversation in, a response or its events out; kept for the next turn.

Knows the wire format, not HTTP.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from gapless.server.conversation import Talk, turns
from gapless.server.demands import demanded
from gapless.server.errors import ApiError, dump
from gapless.server.generation import Generation
from gapless.server.history import told_reply
from gapless.server.items import ItemEvent, OutputItems
from gapless.server.logprobs import TokenTexts, tell_logprobs
from gapless.server.memory import Kept, Memory
from gapless.server.neutral import refuse_unsupported
from gapless.server.protocol import ResponsesRequest
from gapless.server.replies import AT_ONCE, ReplyPlan
from gapless.server.service import Caller, PromptPlan, Service
from gapless.server.sse import event
from gapless.server.tools import response_tools
from gapless.server.usage import num_reasoning_tokens
from gapless.text.deltas import WholeReply
from gapless.text.tools.base import Tool

LOGPROBS = "message.output_text.logprobs"  # the one thing that can be included


class ResponseAnswer:
    """One turn being answered."""

    def __init__(
        self,
        generation: Generation,
        body: ResponsesRequest,
        model: str,
        talk: Talk,
        memory: Memory,
        texts: TokenTexts,
        replies: ReplyPlan,
    ) -> None:
        self._generation = generation
        self._texts = texts
        self._body = body
        self._model = model
        self._talk = talk
        self._memory = memory
        self._replies = replies
        self._parser = replies.parser()
        self._count = replies.reasoning_count(texts.tokenizer)
        self._items = OutputItems()
        self._reply = WholeReply()
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_events = 0

    async def whole(self) -> dict[str, Any]:
        await self._generation.finish()
        choice = self._generation.choices[0]
        await self._take("", choice.told, is_last=False)
        for start in range(0, len(choice.text), AT_ONCE):
            await self._take(choice.text[start : start + AT_ONCE], range(0), is_last=False)
            await asyncio.sleep(0)
        await self._take("", range(0), is_last=True)
        return self._finished()

    async def events(self) -> AsyncIterator[bytes]:
        """The events of the API, numbered; the last one carries the whole response."""
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))
        async for pieces in self._generation.pieces():
            for piece in pieces:
                for kind, data in await self._take(piece.text, piece.told, is_last=piece.finish_reason is not None):
                    yield self._event(kind, **data)
        response = self._finished()
        yield self._event(f"response.{response['status']}", response=response)

    async def _take(self, text: str, told: range, *, is_last: bool) -> list[ItemEvent]:
        """Read on; the events that tell of it."""
        choice, items = self._generation.choices[0], self._items
        items.entries += await tell_logprobs(self._texts, choice.scores(told), begins=told.start == 0)
        deltas = self._parser.push(text)
        if is_last:
            deltas += self._parser.finish()
        self._reply.add(deltas)
        events = [event for delta in deltas for event in items.add(delta)]
        return [*events, *items.finish(self._status)] if is_last else events

    @property
    def _status(self) -> str:
        return "incomplete" if self._generation.choices[0].finish_reason == "length" else "completed"

    def error_event(self, error: ApiError) -> bytes:
        """The event that ends a stream which cannot go on."""
        detail = error.body["error"]
        failed = self._response("failed", []) | {"error": {"code": "server_error", "message": error.message}}
        told = {"code": detail["code"], "message": detail["message"], "param": detail["param"]}
        return self._event("error", **told) + self._event("response.failed", response=failed)

    def close(self) -> None:
        """Nobody waits for the answer any more."""
        self._generation.abort()

    def _finished(self) -> dict[str, Any]:
        choice, status = self._generation.choices[0], self._status
        response = self._response(status, self._items.done)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        flight = choice.flight
        response["usage"] = {
            "input_tokens": len(flight.prompt),
            "input_tokens_details": {"cached_tokens": flight.num_cached or 0, "cache_write_tokens": 0},
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens(choice, self._count)},
            "total_tokens": len(flight.prompt) + choice.num_tokens,
        }
        if self._body.store is not False:
            self._memory.keep(self._id, Kept([*self._talk, told_reply(self._reply)], dump(response)))
        return response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": self._replies.toolbox.is_parallel,
            "presence_penalty": body.presence_penalty or 0.0,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}} | (body.text or {}),
            "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
            "tools": [_told_tool(tool) for tool in self._replies.toolbox.tools],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def _event(self, kind: str, **data: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return event({"type": kind, "sequence_number": number, **data}, kind)


async def answer_response(service: Service, body: ResponsesRequest, memory: Memory, caller: Caller) -> ResponseAnswer:
    """Check, tokenize and start. Raises ApiError."""
    model = service.check_model(body.model)
    refuse_unsupported(body)
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        raise ApiError(400, "the events of a response do not tell usage so far", param="stream_options")
    logprobs = _num_logprobs(service, body)
    earlier = memory.recall(body.previous_response_id) if body.previous_response_id is not None else []
    talk = [*earlier, *turns(body.input, earlier)]
    instructed: Talk = [{"role": "system", "content": body.instructions}] if body.instructions is not None else []
    prompts, toolbox = service.prompts, response_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    if toolbox.offered and logprobs is not None:
        raise ApiError(400, "log-probabilities cannot be included in a response that may call tools", param="include")
    values = prompts.template_values(body.chat_template_kwargs, "chat_template_kwargs")
    if body.reasoning is not None and body.reasoning.effort is not None:
        values |= prompts.reasoning_effort(body.reasoning.effort, "reasoning.effort")
    prompt = await prompts.encode_chat([*instructed, *talk], param="input", tools=toolbox.offered, values=values)
    replies = prompts.plan_reply(toolbox, prompt)
    max_tokens = service.room_for(prompt, body.max_output_tokens, param="input")
    params = demanded(replies, service.params(body, max_tokens, None, logprobs=logprobs))
    by_default = body.max_output_tokens is None
    plan = PromptPlan(prompt, params, tells_all=False, by_default=by_default, shown=replies.shown)
    generation = await service.start([plan], body.timeout, caller)
    return ResponseAnswer(generation, body, model, talk, memory, service.token_texts(), replies)


def _num_logprobs(service: Service, body: ResponsesRequest) -> int | None:
    """How many of the likeliest tokens to tell for each position, beside the token itself; None for nothing at all."""
    for name in body.include or ():
        if name != LOGPROBS:
            raise ApiError(400, f"{name!r} cannot be included", param="include", code="unsupported_parameter")
    if body.top_logprobs and not body.include:
        raise ApiError(400, f"top_logprobs needs include to have {LOGPROBS!r}", param="top_logprobs")
    service.check_logprobs(body.top_logprobs, param="top_logprobs")
    return (body.top_logprobs or 0) if body.include else None


def _told_tool(tool: Tool) -> dict[str, Any]:
    function = tool.described()["function"]
    return {"type": "function", "description": None, **function, "strict": tool.strict}
