"""`/v1/completions`: texts or token ids in, their continuations out. Knows the wire format, not HTTP."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from gapless.server.chat import usage
from gapless.server.errors import ApiError, dump_early
from gapless.server.generation import Generation, Piece
from gapless.server.logprobs import CompletionLogprobs, TokenTexts
from gapless.server.protocol import CompletionRequest, refuse_unsupported
from gapless.server.service import Plan, Service
from gapless.server.sse import DONE, event

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionAnswer:
    """Prompts being continued."""

    def __init__(
        self, generation: Generation, body: CompletionRequest, model: str, echoes: Sequence[str], texts: TokenTexts
    ) -> None:
        self._generation = generation
        self._body = body
        self._model = model
        self._tells_ids = bool(body.return_token_ids)
        self._echoes = echoes  # for each choice, what to say before its own text
        self._begun: set[int] = set()  # choices that have said it
        self._logprobs = [CompletionLogprobs(texts) for _ in generation.choices] if body.logprobs is not None else []
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        await self._generation.finish()
        choices = []
        for choice in self._generation.choices:
            piece = Piece(choice, choice.text, choice.tokens, choice.finish_reason, choice.logprobs)
            choices.append(await dump_early(await self._choice(piece)))
        return self._head() | {"choices": choices, "usage": usage(self._generation.choices)}

    async def events(self) -> AsyncIterator[bytes]:
        """Chunks of each choice as they come, then usage if asked for, then [DONE]."""
        async for pieces in self._generation.pieces():
            for piece in pieces:
                if self._says_anything(piece):
                    yield event(self._head() | {"choices": [await self._choice(piece)]})
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield event(self._head() | {"choices": [], "usage": usage(self._generation.choices)})
        yield DONE

    def _says_anything(self, piece: Piece) -> bool:
        return bool(piece.text or piece.finish_reason or piece.logprobs or self._tells_ids)

    async def _choice(self, piece: Piece) -> dict[str, Any]:
        """A piece on the wire. The first one of a choice echoes its prompt, if asked to."""
        choice, text = piece.choice, piece.text
        tokens: list[int] = list(piece.tokens)
        scores = piece.logprobs
        if self._echoes and choice.index not in self._begun:
            self._begun.add(choice.index)
            text = self._echoes[choice.index] + text
            tokens = [*choice.flight.prompt, *tokens]
            scores = [*choice.flight.prompt_logprobs, *scores]
        logprobs = await self._logprobs[choice.index].tell(tokens, scores) if self._logprobs else None
        told = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        return told | {"token_ids": list(piece.tokens)} if self._tells_ids else told

    def error_event(self, error: ApiError) -> bytes:
        """What a stream says when it cannot go on."""
        return event(error.body) + DONE

    def close(self) -> None:
        """Nobody waits for the answer any more."""
        self._generation.abort()

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}


async def answer_completion(service: Service, body: CompletionRequest, client: str) -> CompletionAnswer:
    """Check, tokenize and start. Raises ApiError."""
    model = service.check_model(body.model)
    refuse_unsupported(body)
    service.check_logprobs(body.logprobs, param="logprobs")
    given = _prompts(body)
    service.check_choices(len(given), body.n)
    prompts = [await _tokens(service, prompt) for prompt in given]
    wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    plans = []
    for prompt in prompts:
        max_tokens = max(1, service.room_for(prompt, max(1, wanted), param="prompt"))
        scores = {"logprobs": body.logprobs, "prompt_logprobs": body.logprobs if body.echo else None}
        plans.append(Plan(prompt, service.params(body, max_tokens, body.stop, **scores), shows_tokens=wanted > 0))
    texts = [await service.decode(prompt) for prompt in prompts] if body.echo else []
    echoes = [text for text in texts for _ in range(body.n or 1)]
    generation = service.start(plans, body.n, body.timeout, client)
    return CompletionAnswer(generation, body, model, echoes, service.token_texts)


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "the prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]  # one prompt of token ids
    return prompt  # type: ignore[return-value]  # several


async def _tokens(service: Service, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        await asyncio.sleep(0)  # many short prompts take as long as a long one
        return await service.encode(prompt, param="prompt")
    service.check_tokens(prompt, "prompt")
    return prompt
