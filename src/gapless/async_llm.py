"""`AsyncLLM`: many callers on an event loop, one engine.

Tokens reach the event loop through `call_soon_threadsafe`; the engine never waits for a reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any

from gapless.client import Client, Completion, Delta, Job, Message, Prompt, check_compiled, check_params, make_options
from gapless.core.outcome import Finished, Progress
from gapless.core.params import SamplingParams
from gapless.core.processor import LogitsProcessor
from gapless.pipeline.engine import Stats
from gapless.progress import progress_bar


class AsyncLLM:
    """A model, loaded and ready, for `async` code. Options are those of `LLM`."""

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2",
        *,
        logits_processors: Sequence[LogitsProcessor] = (),
        **options: Any,
    ) -> None:
        resolved = make_options(model, options)
        with progress_bar("loading", unit="tensor") as bar:
            self._client = Client(resolved, bar.to, logits_processors)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Delta]:
        """Continue a prompt, piece by piece. Leaving the loop, or cancelling the task, ends the request."""
        tokens = self._client.encode(prompt)
        return self._stream(self._client.prepare(tokens, check_params(params), streams=True))

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> AsyncIterator[Delta]:
        """Answer a conversation, piece by piece."""
        tokens = self._client.encode_chat(messages)
        return self._stream(self._client.prepare(tokens, check_params(params), streams=True))

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Completion:
        """Continue a prompt and wait for all of it."""
        tokens = self._client.encode(prompt)
        return await self._last(self._client.prepare(tokens, check_params(params), streams=False))

    async def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation and wait for all of it."""
        tokens = self._client.encode_chat(messages)
        return await self._last(self._client.prepare(tokens, check_params(params), streams=False))

    def stats(self) -> Stats:
        """All counters, now."""
        return self._client.engine.monitor.stats()

    async def close(self) -> None:
        """Stop the engine. What still runs is aborted, and its callers are told."""
        await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _last(self, job: Job) -> Completion:
        async for delta in self._stream(job):
            if delta.completion is not None:
                return delta.completion
        raise AssertionError("a stream ended without its completion")

    async def _stream(self, job: Job) -> AsyncIterator[Delta]:
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Progress | Finished] = asyncio.Queue()

        def deliver(item: Progress | Finished) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(news.put_nowait, item)

        try:  # from the first request on: whoever leaves while a grammar is compiled leaves others running
            for request in job.requests:
                if (grammar := self._client.engine.compile(request.params)) is not None:
                    await asyncio.gather(asyncio.wrap_future(grammar), return_exceptions=True)
                    check_compiled(grammar)
                self._client.engine.submit(request, deliver)
            while True:
                delta = job.take(await news.get())
                yield delta
                if delta.completion is not None:
                    return
        finally:
            for request in job.requests:
                self._client.engine.abort(request.id)
