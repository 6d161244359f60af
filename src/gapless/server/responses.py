"""`/v1/responses`: a turn of a conversation in, a response or its events out; kept for the next turn.

Knows the wire format, not HTTP.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from gapless.server.conversation import Talk, turns
from gapless.server.errors import ApiError, dump
from gapless.server.generation import Choice, Generation
from gapless.server.logprobs import TokenTexts, tell_logprobs
from gapless.server.memory import Kept, Memory
from gapless.server.neutral import refuse_unsupported
from gapless.server.protocol import ResponsesRequest
from gapless.server.service import PromptPlan, Service
from gapless.server.sse import event

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
    ) -> None:
        self._generation = generation
        self._texts = texts
        self._body = body
        self._model = model
        self._talk = talk
        self._memory = memory
        self._id = f"resp_{uuid.uuid4().hex}"
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_events = 0

    async def whole(self) -> dict[str, Any]:
        await self._generation.finish()
        return await self._finished()

    async def events(self) -> AsyncIterator[bytes]:
        """The events of the API, numbered; the last one carries the whole response."""
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))
        yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress", None))
        yield self._event("response.content_part.added", **place, part=_part(""))
        async for pieces in self._generation.pieces():
            for piece in pieces:
                if piece.text or piece.told:
                    scores = await self._logprobs(piece.choice, piece.told, with_bytes=False)
                    yield self._event("response.output_text.delta", **place, delta=piece.text, logprobs=scores)
        response = await self._finished()
        item, choice = response["output"][0], self._generation.choices[0]
        scores = await self._logprobs(choice, choice.told, with_bytes=False)
        yield self._event("response.output_text.done", **place, text=choice.text, logprobs=scores)
        yield self._event("response.content_part.done", **place, part=item["content"][0])
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    def error_event(self, error: ApiError) -> bytes:
        """The event that ends a stream which cannot go on."""
        detail = error.body["error"]
        failed = self._response("failed", []) | {"error": {"code": "server_error", "message": error.message}}
        told = {"code": detail["code"], "message": detail["message"], "param": detail["param"]}
        return self._event("error", **told) + self._event("response.failed", response=failed)

    def close(self) -> None:
        """Nobody waits for the answer any more."""
        self._generation.abort()

    async def _finished(self) -> dict[str, Any]:
        choice = self._generation.choices[0]
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        part = _part(choice.text) | {"logprobs": await self._logprobs(choice, choice.told)}
        response = self._response(status, [self._item(status, part)])
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        flight = choice.flight
        response["usage"] = {
            "input_tokens": len(flight.prompt),
            "input_tokens_details": {"cached_tokens": flight.num_cached or 0, "cache_write_tokens": 0},
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(flight.prompt) + choice.num_tokens,
        }
        if self._body.store is not False:
            talk = [*self._talk, {"role": "assistant", "content": choice.text}]
            self._memory.keep(self._id, Kept(talk, dump(response)))
        return response

    async def _logprobs(self, choice: Choice, told: range, *, with_bytes: bool = True) -> list[dict[str, Any]]:
        scores = choice.scores(told)
        return await tell_logprobs(self._texts, scores, begins=told.start == 0, with_bytes=with_bytes)

    def _item(self, status: str, part: dict[str, Any] | None) -> dict[str, Any]:
        content = [part] if part is not None else []
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

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
            "frequency_penalty": 0.0,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": bool(body.parallel_tool_calls),
            "presence_penalty": 0.0,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": (body.model_extra or {}).get("tool_choice") or "none",
            "tools": [],
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


async def answer_response(service: Service, body: ResponsesRequest, memory: Memory, client: str) -> ResponseAnswer:
    """Check, tokenize and start. Raises ApiError."""
    model = service.check_model(body.model)
    refuse_unsupported(body)
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        raise ApiError(400, "the events of a response do not tell usage so far", param="stream_options")
    logprobs = _num_logprobs(service, body)
    earlier = memory.recall(body.previous_response_id) if body.previous_response_id is not None else []
    talk = [*earlier, *turns(body.input)]
    instructed: Talk = [{"role": "system", "content": body.instructions}] if body.instructions is not None else []
    prompt = await service.encode_chat([*instructed, *talk], param="input")
    max_tokens = service.room_for(prompt, body.max_output_tokens, param="input")
    params = service.params(body, max_tokens, None, logprobs=logprobs)
    plan = PromptPlan(prompt, params, tells_all=False, by_default=body.max_output_tokens is None)
    generation = service.start([plan], body.timeout, client)
    return ResponseAnswer(generation, body, model, talk, memory, service.token_texts())


def _num_logprobs(service: Service, body: ResponsesRequest) -> int | None:
    """How many of the likeliest tokens to tell for each position, beside the token itself; None for nothing at all."""
    for name in body.include or ():
        if name != LOGPROBS:
            raise ApiError(400, f"{name!r} cannot be included", param="include", code="unsupported_parameter")
    if body.top_logprobs and not body.include:
        raise ApiError(400, f"top_logprobs needs include to have {LOGPROBS!r}", param="top_logprobs")
    service.check_logprobs(body.top_logprobs, param="top_logprobs")
    return (body.top_logprobs or 0) if body.include else None


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
