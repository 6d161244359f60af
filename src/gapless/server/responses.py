"""`/v1/responses`: a turn of a conversation in, a response or its events out; remembers it for the next turn.

Knows the wire format, not HTTP. The memory is bounded: the oldest conversations are forgotten first.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Any

from gapless.server.errors import ApiError
from gapless.server.generation import Generation
from gapless.server.logprobs import TokenTexts, tell_logprobs
from gapless.server.protocol import ResponsesRequest, refuse_unsupported
from gapless.server.service import Plan, Service
from gapless.server.sse import event

MAX_KEPT = 1000
MAX_KEPT_CHARACTERS = 64 * 2**20
LOGPROBS = "message.output_text.logprobs"  # the one thing that can be included
TEXT_KINDS = ("input_text", "output_text", "text")
Talk = list[dict[str, Any]]


class Memory:
    """Conversations by the id of their last response."""

    def __init__(self) -> None:
        self._talks: OrderedDict[str, Talk] = OrderedDict()
        self._num_characters = 0

    def recall(self, id: str) -> Talk:
        if id not in self._talks:
            message = f"previous response {id!r} is not here (any more)"
            raise ApiError(404, message, param="previous_response_id", code="previous_response_not_found")
        self._talks.move_to_end(id)
        return self._talks[id]

    def keep(self, id: str, talk: Talk) -> None:
        self._talks[id] = talk
        self._num_characters += _size(talk)
        while len(self._talks) > MAX_KEPT or self._num_characters > MAX_KEPT_CHARACTERS:
            _, old = self._talks.popitem(last=False)
            self._num_characters -= _size(old)


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
                if piece.text or piece.logprobs:
                    scores = await tell_logprobs(self._texts, piece.logprobs, with_bytes=False)
                    yield self._event("response.output_text.delta", **place, delta=piece.text, logprobs=scores)
        response = await self._finished()
        item, choice = response["output"][0], self._generation.choices[0]
        scores = await tell_logprobs(self._texts, choice.logprobs, with_bytes=False)
        yield self._event("response.output_text.done", **place, text=choice.text, logprobs=scores)
        yield self._event("response.content_part.done", **place, part=item["content"][0])
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    def error_event(self, error: ApiError) -> bytes:
        """What a stream says when it cannot go on."""
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
        part = _part(choice.text) | {"logprobs": await tell_logprobs(self._texts, choice.logprobs)}
        response = self._response(status, [self._item(status, part)])
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        flight = choice.flight
        response["usage"] = {
            "input_tokens": len(flight.prompt),
            "input_tokens_details": {"cached_tokens": flight.num_cached or 0},
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(flight.prompt) + choice.num_tokens,
        }
        if self._body.store is not False:
            self._memory.keep(self._id, [*self._talk, {"role": "assistant", "content": choice.text}])
        return response

    def _item(self, status: str, part: dict[str, Any] | None) -> dict[str, Any]:
        content = [part] if part is not None else []
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, params = self._body, self._generation.choices[0].flight.params
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _event(self, kind: str, **data: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return event({"type": kind, "sequence_number": number, **data}, kind)


async def answer_response(service: Service, body: ResponsesRequest, memory: Memory, client: str) -> ResponseAnswer:
    """Check, tokenize and start. Raises ApiError."""
    model = service.check_model(body.model)
    refuse_unsupported(body)
    logprobs = _num_logprobs(service, body)
    earlier = memory.recall(body.previous_response_id) if body.previous_response_id is not None else []
    talk = [*earlier, *_turns(body.input)]
    instructed: Talk = [{"role": "system", "content": body.instructions}] if body.instructions is not None else []
    prompt = await service.encode_chat([*instructed, *talk], param="input")
    max_tokens = service.room_for(prompt, body.max_output_tokens, param="input")
    params = service.params(body, max_tokens, None, logprobs=logprobs)
    generation = service.start([Plan(prompt, params)], None, body.timeout, client)
    return ResponseAnswer(generation, body, model, talk, memory, service.token_texts)


def _num_logprobs(service: Service, body: ResponsesRequest) -> int | None:
    """How many of the likeliest tokens to tell for each position, beside the token itself; None for nothing at all."""
    for name in body.include or ():
        if name != LOGPROBS:
            raise ApiError(400, f"{name!r} cannot be included", param="include", code="unsupported_parameter")
    if body.top_logprobs and not body.include:
        raise ApiError(400, f"top_logprobs needs include to have {LOGPROBS!r}", param="top_logprobs")
    service.check_logprobs(body.top_logprobs, param="top_logprobs")
    return (body.top_logprobs or 0) if body.include else None


def _turns(given: str | list[dict[str, Any]]) -> Talk:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise ApiError(400, "input is empty; it needs at least one message", param="input")
    return [_turn(index, item) for index, item in enumerate(given)]


def _turn(index: int, item: dict[str, Any]) -> dict[str, Any]:
    where = f"input[{index}]"
    if item.get("type", "message") != "message" or not isinstance(item.get("role"), str):
        raise ApiError(400, f"{where} must be a message with a role; other items are not supported", param="input")
    role = "system" if item["role"] == "developer" else item["role"]
    return {"role": role, "content": _content(where, item.get("content"))}


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ApiError(400, f"{where}.content must be text or a list of text parts", param="input")
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in TEXT_KINDS or not isinstance(part.get("text"), str):
            raise ApiError(400, f"{where}.content may only have parts of text", param="input")
    return "\n".join(part["text"] for part in content)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _size(talk: Talk) -> int:
    return sum(len(turn["content"]) for turn in talk)
