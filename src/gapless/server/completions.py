"""`/v1/completions`: texts or token ids in, their continuations out. Knows the wire format, not HTTP."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from gapless.server.errors import ApiError, dump_early
from gapless.server.generation import Choice, Generation, Piece
from gapless.server.logprobs import TokenTexts, prompt_starts, tell_completion_logprobs, tell_prompt_logprobs
from gapless.server.neutral import refuse_unsupported
from gapless.server.protocol import CompletionRequest
from gapless.server.service import Caller, PromptPlan, Service
from gapless.server.sse import DONE, event
from gapless.server.usage import StreamUsage, usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionAnswer:
    """Prompts being continued."""

    def __init__(
        self, generation: Generation, body: CompletionRequest, model: str, echoes: Sequence[str], texts: TokenTexts
    ) -> None:
        self._generation = generation
        self._body = body
        self._model = model
        self._texts = texts
        self._echoes = echoes  # for each choice, what to say before its own text
        self._begun: set[int] = set()  # choices that have said something
        self._usage = StreamUsage(body.stream_options, generation.choices)
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        choices = []
        for choice in await self._generation.finish():
            piece = Piece(choice, choice.text, choice.tokens, choice.finish_reason, choice.told)
            choices.append(await dump_early(await self._choice(piece)))
        return self._head() | {"choices": choices, "usage": usage(self._generation.choices)}

    async def events(self) -> AsyncIterator[bytes]:
        """Chunks of each choice as they come, then usage if asked for, then [DONE]."""
        async for pieces in self._generation.pieces():
            for piece in pieces:
                if piece.text or piece.finish_reason or piece.told or self._body.return_token_ids:
                    yield event(self._head() | {"choices": [await self._choice(piece)]} | self._usage.each())
        if self._usage.at_end:
            yield event(self._head() | {"choices": [], "usage": self._usage.now()})
        yield DONE

    async def _choice(self, piece: Piece) -> dict[str, Any]:
        """A piece on the wire. The first one of a choice tells of its prompt, if asked to."""
        choice, text = piece.choice, piece.text
        begins = choice.index not in self._begun
        self._begun.add(choice.index)
        if begins and self._echoes:
            text = self._echoes[choice.index] + text
        logprobs = await self._logprobs(piece, begins) if self._body.logprobs is not None else None
        told = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        if self._body.return_token_ids:
            told["token_ids"] = list(piece.tokens)
            told |= {"prompt_token_ids": list(choice.flight.prompt)} if begins else {}
        return told | await self._prompt_logprobs(choice)

    async def _logprobs(self, piece: Piece, begins: bool) -> dict[str, Any]:
        """Offsets are places in the returned text. Tokens that a stop string cut off stand at its end."""
        choice, told = piece.choice, piece.told
        echo = self._echoes[choice.index] if self._echoes else ""
        end = choice.num_shown
        tokens = list(choice.tokens[told.start : told.stop])
        starts = [len(echo) + min(start, end) for start in choice.starts[told.start : told.stop]]
        scores = choice.scores(told)
        if begins and self._echoes:
            prompt = choice.flight.prompt
            tokens = [*prompt, *tokens]
            starts = [*await prompt_starts(self._texts.tokenizer, prompt), *starts]
            scores = [*choice.flight.prompt_logprobs, *scores]
        count = self._body.logprobs or 0
        return await tell_completion_logprobs(
            self._texts, tokens, scores, starts, count, begins=begins or told.start == 0
        )

    async def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        count, scores = self._body.prompt_logprobs, choice.flight.prompt_logprobs
        return {} if count is None else {"prompt_logprobs": await tell_prompt_logprobs(self._texts, scores, count)}

    def error_event(self, error: ApiError) -> bytes:
        """The event that ends a stream which cannot go on."""
        return event(error.body) + DONE

    def close(self) -> None:
        """Nobody waits for the answer any more."""
        self._generation.abort()

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}


async def answer_completion(service: Service, body: CompletionRequest, caller: Caller) -> CompletionAnswer:
    """Check, tokenize and start. Raises ApiError."""
    model = service.check_model(body.model)
    refuse_unsupported(body)
    service.check_logprobs(body.logprobs, param="logprobs")
    service.check_prompt_logprobs(body)
    given = _prompts(body)
    service.check_choices(len(given), body)
    prompts = [await _tokens(service, prompt) for prompt in given]
    wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    plans = []
    more = {"logprobs": body.logprobs, "prompt_logprobs": _num_of_prompt(body), "n": body.n, "best_of": body.best_of}
    for prompt in prompts:
        max_tokens = max(1, service.room_for(prompt, max(1, wanted), param="prompt"))
        plans.append(PromptPlan(prompt, service.params(body, max_tokens, body.stop, **more), shows_tokens=wanted > 0))
    texts = [await service.prompts.decode(prompt) for prompt in prompts] if body.echo else []
    echoes = [text for text in texts for _ in range(body.n or 1)]
    generation = await service.start(plans, body.timeout, caller)
    return CompletionAnswer(generation, body, model, echoes, service.token_texts(body.return_tokens_as_token_ids))


def _num_of_prompt(body: CompletionRequest) -> int | None:
    """How many of the likeliest tokens to ask for at each place of the prompt; None for no log-probabilities."""
    asked = [count for count in (body.prompt_logprobs, body.logprobs if body.echo else None) if count is not None]
    return max(asked, default=None)


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
        return await service.prompts.encode(prompt, param="prompt")
    service.check_tokens(prompt, "prompt")
    return prompt
