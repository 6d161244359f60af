"""`/v1/completions`: texts or token ids in, their continuations out. Knows the wire format, not HTTP."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from gapless.server.chat import usage
from gapless.server.errors import ApiError
from gapless.server.generation import Choice, Generation, Piece
from gapless.server.protocol import CompletionRequest, refuse_unsupported
from gapless.server.service import Plan, Service
from gapless.server.sse import DONE, event

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionAnswer:
    """Prompts being continued."""

    def __init__(self, generation: Generation, body: CompletionRequest, model: str, echoes: Sequence[str]) -> None:
        self._generation = generation
        self._body = body
        self._model = model
        self._tells_ids = bool(body.return_token_ids)
        self._echoes = echoes  # for each choice, what to say before its own text
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        await self._generation.finish()
        choices = [self._choice(c, self._echo(c) + c.text, c.tokens) for c in self._generation.choices]
        return self._head() | {"choices": choices, "usage": usage(self._generation.choices)}

    async def events(self) -> AsyncIterator[bytes]:
        """Chunks of each choice as they come, then usage if asked for, then [DONE]."""
        for choice in self._generation.choices:
            if echo := self._echo(choice):
                yield event(self._head() | {"choices": [self._choice(choice, echo, (), finished=False)]})
        async for pieces in self._generation.pieces():
            shown = [piece for piece in pieces if piece.text or piece.finish_reason or self._tells_ids]
            yield b"".join(self._piece(piece) for piece in shown)
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield event(self._head() | {"choices": [], "usage": usage(self._generation.choices)})
        yield DONE

    def _piece(self, piece: Piece) -> bytes:
        choice = self._choice(piece.choice, piece.text, piece.tokens, finished=piece.finish_reason is not None)
        return event(self._head() | {"choices": [choice]})

    def _choice(self, choice: Choice, text: str, tokens: Sequence[int], *, finished: bool = True) -> dict[str, Any]:
        reason = choice.finish_reason if finished else None
        told = {"index": choice.index, "text": text, "logprobs": None, "finish_reason": reason}
        return told | {"token_ids": list(tokens)} if self._tells_ids else told

    def _echo(self, choice: Choice) -> str:
        return self._echoes[choice.index] if self._echoes else ""

    def error_event(self, error: ApiError) -> bytes:
        """What a stream says when it cannot go on."""
        return event(error.body) + DONE

    def close(self) -> None:
        """Nobody waits for the answer any more."""
        self._generation.abort()

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}


async def answer_completion(service: Service, body: CompletionRequest) -> CompletionAnswer:
    """Check, tokenize and start. Raises ApiError."""
    model = service.check_model(body.model)
    refuse_unsupported(body)
    if body.logprobs is not None:
        raise ApiError(400, "logprobs are not supported", param="logprobs", code="unsupported_parameter")
    prompts = [await _tokens(service, prompt) for prompt in _prompts(body)]
    wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    plans = []
    for prompt in prompts:
        max_tokens = max(1, service.room_for(prompt, max(1, wanted), param="prompt"))
        plans.append(Plan(prompt, service.params(body, max_tokens, body.stop), shows_tokens=wanted > 0))
    echoes = [service.decode(prompt) for prompt in prompts for _ in range(body.n or 1)] if body.echo else []
    return CompletionAnswer(service.start(plans, body.n, body.timeout), body, model, echoes)


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
        return await service.encode(prompt, param="prompt")
    service.check_tokens(prompt, "prompt")
    return prompt
