"""`/v1/chat/completions`: conversations in, messages or chunks of them out. Knows the wire format, not HTTP."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from gapless.server.errors import ApiError, dump_early
from gapless.server.generation import Choice, Generation, Piece
from gapless.server.logprobs import TokenTexts, tell_logprobs
from gapless.server.messages import Scores
from gapless.server.protocol import ChatRequest, refuse_unsupported
from gapless.server.service import Plan, Service
from gapless.server.sse import DONE, event


class ChatAnswer:
    """One conversation being answered."""

    def __init__(self, generation: Generation, body: ChatRequest, model: str, texts: TokenTexts) -> None:
        self._texts = texts
        self._generation = generation
        self._body = body
        self._model = model
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        await self._generation.finish()
        choices = [await dump_early(await self._choice(choice)) for choice in self._generation.choices]
        return self._head("chat.completion") | {"choices": choices, "usage": usage(self._generation.choices)}

    async def _choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": await self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Chunks: the role, then the text of each choice as it comes, then usage if asked for, then [DONE]."""
        for choice in self._generation.choices:
            yield self._chunk(choice.index, {"role": "assistant", "content": ""})
        async for pieces in self._generation.pieces():
            for piece in pieces:
                yield await self._piece(piece)
        options = self._body.stream_options
        if options is not None and options.include_usage:
            head = self._head("chat.completion.chunk")
            yield event(head | {"choices": [], "usage": usage(self._generation.choices)})
        yield DONE

    async def _piece(self, piece: Piece) -> bytes:
        index, data = piece.choice.index, b""
        if piece.text or piece.logprobs:
            data = self._chunk(index, {"content": piece.text}, logprobs=await self._logprobs(piece.logprobs))
        if piece.finish_reason is not None:
            data += self._chunk(index, {}, finish_reason=piece.finish_reason)
        return data

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event(self._head("chat.completion.chunk") | {"choices": [choice]})

    async def _logprobs(self, scores: Sequence[Scores]) -> dict[str, Any] | None:
        return {"content": await tell_logprobs(self._texts, scores), "refusal": None} if self._body.logprobs else None

    def error_event(self, error: ApiError) -> bytes:
        """What a stream says when it cannot go on."""
        return event(error.body) + DONE

    def close(self) -> None:
        """Nobody waits for the answer any more."""
        self._generation.abort()

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}


async def answer_chat(service: Service, body: ChatRequest, client: str) -> ChatAnswer:
    """Check, tokenize and start. Raises ApiError."""
    model = service.check_model(body.model)
    refuse_unsupported(body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    service.check_logprobs(body.top_logprobs, param="top_logprobs")
    service.check_choices(1, body.n)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens differ; send one", param="max_tokens")
    prompt = await service.encode_chat(service.chat_messages(body.messages))
    max_tokens = service.room_for(prompt, body.max_completion_tokens or body.max_tokens, param="messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = service.params(body, max_tokens, body.stop, logprobs=logprobs)
    generation = service.start([Plan(prompt, params)], body.n, body.timeout, client)
    return ChatAnswer(generation, body, model, service.token_texts)


def usage(choices: list[Choice] | Any) -> dict[str, Any]:
    """Tokens in and out. A prompt that several choices share counts once."""
    prompts = {id(choice.flight.prompt): choice.flight for choice in choices}
    num_prompt = sum(len(flight.prompt) for flight in prompts.values())
    num_output = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(flight.num_cached or 0 for flight in prompts.values())},
    }
