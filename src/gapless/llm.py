"""`LLM`: generate for many prompts and wait.

The caller's thread tokenizes, waits and builds text; the engine's threads do the rest.
"""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

from gapless.client import Client, Completion, Delta, Job, Message, Prompt, check_compiled, check_params, make_options
from gapless.core.outcome import Finished, Progress
from gapless.core.params import SamplingParams
from gapless.core.processor import LogitsProcessor
from gapless.errors import InvalidRequest
from gapless.garbage import heap_frozen
from gapless.pipeline.engine import Engine, Stats
from gapless.progress import progress_bar
from gapless.text.tokenizer import Tokenizer

QUEUED_AHEAD = 4  # times the number of rows: prompts prepared before the first result is awaited


class LLM:
    """A model, loaded and ready. Close it, or use it in a `with` block.

    Options are those of `gapless.config.EngineOptions`: device, dtype, depth, block_size, num_blocks, kv_memory,
    max_batch_tokens, max_num_rows, max_model_len, seed, load_format, quantization, kv_dtype, prefix_cache,
    num_threads, check, interleave, trace. `logits_processors` change logits in Python (docs/logits-processors.md).
    """

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

    @property
    def engine(self) -> Engine:
        return self._client.engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._client.tokenizer

    def stats(self) -> Stats:
        """All counters, now; subtract two readings to describe a run."""
        return self.engine.monitor.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Continue each prompt; results in input order. The first ones run while the others are tokenized and checked.

        All are checked right after the first result at the latest. One that is refused raises InvalidRequest and ends
        the others.
        """
        texts = _as_prompts(prompts)
        return self._generate(texts, self._encode, _as_params(params, len(texts)))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Any:
        """Answer a conversation, or each of a list of conversations."""
        if not isinstance(messages, (list, tuple)):
            raise InvalidRequest(f"messages must be a list, got {type(messages).__name__}", "messages")
        many = len(messages) > 0 and isinstance(messages[0], (list, tuple))
        talks: Sequence[Any] = messages if many else [messages]
        found = self._generate(talks, self._client.encode_chat, _as_params(params, len(talks)))
        return found if many else found[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, shown_ids: Collection[int] = ()
    ) -> Iterator[Delta]:
        """Continue one prompt, piece by piece. Closing the iterator early ends the request.

        shown_ids: special tokens that are part of the text, such as the tags of tool calls.
        """
        tokens, checked = self._encode(prompt), check_params(params)
        self._compile([checked])
        return self._stream(self._client.prepare(tokens, checked, streams=True, shown_ids=shown_ids))

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Iterator[Delta]:
        """Answer a conversation, piece by piece."""
        return self.stream(self.encode_chat(messages), params)

    def encode_chat(self, messages: Sequence[Message], **values: Any) -> list[int]:
        """The prompt of a conversation as token ids, ready for the assistant's turn. Raises InvalidRequest.

        values: for the chat template, such as `tools`.
        """
        return list(self._client.encode_chat(messages, **values))

    def run(self, jobs: Iterable[tuple[int, Job]]) -> Iterator[tuple[int, Completion]]:
        """Complete jobs as they come, in the order in which they finish; takes new ones while others run.

        Ends what is still running when the caller stops iterating.
        """
        news: queue.SimpleQueue[Progress | Finished] = queue.SimpleQueue()
        running: dict[str, tuple[int, Job]] = {}
        source = iter(jobs)
        try:
            while True:
                while len(running) < self._num_ahead and (found := next(source, None)) is not None:
                    for request in found[1].requests:
                        running[request.id] = found
                        self.engine.submit(request, news.put)
                if not running:
                    return
                item = news.get()
                number, job = running[item.request.id]
                completion = job.take(item).completion
                if isinstance(item, Finished):
                    del running[item.request.id]
                if completion is not None:
                    yield number, completion
        finally:
            for request_id in running:
                self.engine.abort(request_id)

    @property
    def _num_ahead(self) -> int:
        """Requests that may be with the engine at the same time."""
        return QUEUED_AHEAD * self.engine.resolved.limits.num_rows

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None, *, shown_ids: Collection[int] = ()) -> Job:
        """A job for `run`. Raises InvalidRequest. shown_ids: special tokens that are part of the text."""
        return self._client.prepare(self._encode(prompt), check_params(params), streams=False, shown_ids=shown_ids)

    def prepare_chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **values: Any) -> Job:
        """A job for `run`. `values` are for the chat template. Raises InvalidRequest."""
        return self._client.prepare(self._client.encode_chat(messages, **values), check_params(params), streams=False)

    def close(self) -> None:
        """Stop the engine, and write the trace if there is one. What still runs is aborted."""
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # never finished building
            self.engine.close()

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        return self._client.encode(prompt)

    def _compile(self, params: Sequence[SamplingParams]) -> None:
        """Wait until every grammar is compiled. Raises InvalidRequest for one that cannot be used."""
        for index, future in enumerate([self.engine.compile(item) for item in params]):
            if future is not None:
                _named(index, len(params), check_compiled, future)

    def _generate(
        self, prompts: Sequence[Any], encode: Callable[[Any], Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """encode: from a prompt to token ids."""
        self._compile(params)

        def prepare(pair: tuple[Any, SamplingParams]) -> Job:
            return self._client.prepare(encode(pair[0]), pair[1], streams=False)

        def jobs() -> Iterator[tuple[int, Job]]:
            pairs = enumerate(zip(prompts, params, strict=True))
            made = ((i, _named(i, len(prompts), prepare, pair)) for i, pair in pairs)
            num_requests = 0
            for found in made:
                yield found
                num_requests += len(found[1].requests)
                if num_requests >= self._num_ahead:
                    break
            yield from list(made)  # a bad one is to be found before much of the work is done

        results: dict[int, Completion] = {}
        with heap_frozen(), progress_bar("generating", total=len(prompts), unit="prompt") as bar:
            for number, completion in self.run(jobs()):
                results[number] = completion
                bar.advance(1, sum(len(choice.token_ids) for choice in completion.choices))
        return [results[i] for i in range(len(prompts))]

    def _stream(self, job: Job) -> Iterator[Delta]:
        news: queue.SimpleQueue[Progress | Finished] = queue.SimpleQueue()
        try:
            for request in job.requests:
                self.engine.submit(request, news.put)
            while True:
                delta = job.take(news.get())
                yield delta
                if delta.completion is not None:
                    return
        finally:
            for request in job.requests:
                self.engine.abort(request.id)


def _named(index: int, count: int, check: Callable[[Any], Any], value: Any) -> Any:
    """`check(value)`; an error says which of several prompts it is about."""
    try:
        return check(value)
    except InvalidRequest as error:
        if count > 1:
            error.args = (f"prompt {index}: {error}",)
        raise


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(f"prompts must be a list, got {type(prompts).__name__}", "prompts")
    if len(prompts) == 0:
        raise InvalidRequest("no prompts: the list is empty", "prompts")
    if all(type(item) is int for item in prompts):
        return [prompts]  # type: ignore[list-item]  # one prompt of token ids
    return list(prompts)  # type: ignore[arg-type]


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if not isinstance(params, (list, tuple)):
        return [check_params(params)] * count
    if len(params) != count:
        raise InvalidRequest(f"{len(params)} sampling parameters for {count} prompts; give one, or one each", "params")
    return [check_params(item) for item in params]
