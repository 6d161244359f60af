"""`/v1/chat/completions`: conversations in, messages or chunks of them out. Knows the wire format, not HTTP."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from gapless.server.conversation import last_words
from gapless.server.demands import demanded
from gapless.server.errors import ApiError, dump_early
from gapless.server.generation import Choice, Generation, Piece
from gapless.server.logprobs import TokenTexts, tell_logprobs, tell_prompt_logprobs
from gapless.server.neutral import refuse_unsupported
from gapless.server.prompts import PromptWriter
from gapless.server.protocol import ChatRequest, TokenizeRequest
from gapless.server.replies import ReplyPlan, ReplyStream, tell_message
from gapless.server.service import Caller, PromptPlan, Service
from gapless.server.sse import DONE, event
from gapless.server.tools import chat_tools
from gapless.server.usage import StreamUsage


class ChatAnswer:
    """One conversation being answered."""

    def __init__(
        self, generation: Generation, body: ChatRequest, model: str, texts: TokenTexts, replies: ReplyPlan
    ) -> None:
        self._texts = texts
        self._replies = replies
        self._streams = [ReplyStream(replies) for _ in generation.choices]
        self._generation = generation
        self._body = body
        self._model = model
        self._echo = last_words(body.messages) if body.echo else ""
        counts = [replies.reasoning_count(texts.tokenizer) for _ in generation.choices]
        self._usage = StreamUsage(body.stream_options, generation.choices, counts)
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        choices = [await dump_early(await self._choice(choice)) for choice in await self._generation.finish()]
        told = self._head("chat.completion") | {"choices": choices, "usage": self._usage.now()}
        return told | self._prompt_ids() | await self._prompt_logprobs()

    async def _choice(self, choice: Choice) -> dict[str, Any]:
        reply = await self._replies.read(choice.text)
        told = {
            "index": choice.index,
            "message": tell_message(reply, self._echo),
            "logprobs": await self._logprobs(choice, choice.told),
            "finish_reason": self._replies.toolbox.finish_reason(choice.finish_reason, len(reply.calls)),
        }
        return told | {"token_ids": list(choice.tokens)} if self._body.return_token_ids else told

    async def events(self) -> AsyncIterator[bytes]:
        """Chunks: the role, then the text of each choice as it comes, then usage if asked for, then [DONE]."""
        for data in self._openings():
            yield data
        async for pieces in self._generation.pieces():
            for piece in pieces:
                yield await self._piece(piece)
        if self._usage.at_end:
            yield event(self._head("chat.completion.chunk") | {"choices": [], "usage": self._usage.now()})
        yield DONE

    def _openings(self) -> Iterator[bytes]:
        for choice in self._generation.choices:
            yield self._chunk(choice.index, {"role": "assistant", "content": ""}, **self._prompt_ids())
            if self._echo:
                yield self._chunk(choice.index, {"content": self._echo})

    async def _piece(self, piece: Piece) -> bytes:
        index, data = piece.choice.index, b""
        reply, is_last = self._streams[index], piece.finish_reason is not None
        deltas = reply.push(piece.text, is_last=is_last)
        ids = {"token_ids": list(piece.tokens)} if self._body.return_token_ids else {}
        if deltas or piece.told or (ids and piece.tokens):
            logprobs = await self._logprobs(piece.choice, piece.told)
            data = self._chunk(index, deltas[0] if deltas else {"content": ""}, {"logprobs": logprobs} | ids)
            data += b"".join(self._chunk(index, delta) for delta in deltas[1:])
        if is_last:
            reason = self._replies.toolbox.finish_reason(piece.finish_reason, reply.num_calls)
            data += self._chunk(index, {}, {"finish_reason": reason})
        return data

    def _chunk(self, index: int, delta: dict[str, Any], more: dict[str, Any] | None = None, **top: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **(more or {})}
        return event(self._head("chat.completion.chunk") | {"choices": [choice]} | top | self._usage.each())

    async def _logprobs(self, choice: Choice, told: range) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = await tell_logprobs(self._texts, choice.scores(told), begins=told.start == 0)
        return {"content": content, "refusal": None}

    def _prompt_ids(self) -> dict[str, Any]:
        flight = self._generation.choices[0].flight
        return {"prompt_token_ids": list(flight.prompt)} if self._body.return_token_ids else {}

    async def _prompt_logprobs(self) -> dict[str, Any]:
        count, flight = self._body.prompt_logprobs, self._generation.choices[0].flight
        if count is None:
            return {}
        return {"prompt_logprobs": await tell_prompt_logprobs(self._texts, flight.prompt_logprobs, count)}

    def error_event(self, error: ApiError) -> bytes:
        """The event that ends a stream which cannot go on."""
        return event(error.body) + DONE

    def close(self) -> None:
        """Nobody waits for the answer any more."""
        self._generation.abort()

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}


async def answer_chat(service: Service, body: ChatRequest, caller: Caller) -> ChatAnswer:
    """Check, tokenize and start. Raises ApiError."""
    model = service.check_model(body.model)
    refuse_unsupported(body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    service.check_logprobs(body.top_logprobs, param="top_logprobs")
    service.check_prompt_logprobs(body)
    service.check_choices(1, body)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens differ; send one", param="max_tokens")
    wanted = body.max_completion_tokens or body.max_tokens
    prompts = service.prompts
    toolbox = chat_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    messages = prompts.chat_messages(body.messages)
    prompt = await prompts.encode_chat(messages, tools=toolbox.offered, **turn(prompts, body))
    begun = last_words(body.messages) if body.continue_final_message else ""
    replies = prompts.plan_reply(toolbox, prompt, begun=begun, shows_reasoning=body.include_reasoning is not False)
    max_tokens = service.room_for(prompt, wanted, param="messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    more = {"logprobs": logprobs, "prompt_logprobs": body.prompt_logprobs, "n": body.n, "best_of": body.best_of}
    params = demanded(replies, service.params(body, max_tokens, body.stop, **more))
    tells_all = bool(body.return_token_ids)
    plan = PromptPlan(prompt, params, tells_all=tells_all, by_default=wanted is None, shown=replies.shown)
    generation = await service.start([plan], body.timeout, caller)
    return ChatAnswer(generation, body, model, service.token_texts(body.return_tokens_as_token_ids), replies)


def turn(prompts: PromptWriter, body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """The client's wishes for the prompt, first of all whose turn it ends with: arguments of `encode_chat`.

    Raises ApiError.
    """
    values = prompts.template_values(body.chat_template_kwargs, "chat_template_kwargs")
    if isinstance(body, ChatRequest) and body.reasoning_effort is not None:
        values |= prompts.reasoning_effort(body.reasoning_effort, "reasoning_effort")
    if not body.continue_final_message:
        return {"values": values, "add_generation_prompt": body.add_generation_prompt is not False}
    if body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise ApiError(400, message, param="continue_final_message")
    return {"values": values, "add_generation_prompt": False, "continue_final_message": True}
