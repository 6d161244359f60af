"""The caller's side of the engine: from prompts to requests, from tokens to completions.

The common part of `LLM` and `AsyncLLM`. Validates and tokenizes before the queue and builds text after it, both on the
caller's thread, so that the loop's thread never touches text.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from gapless.config import EngineOptions
from gapless.core.choices import best, candidates, is_ranked, mean_logprob
from gapless.core.outcome import Finished, Progress, TokenLogprob, completion_logprobs, prompt_logprobs
from gapless.core.params import SamplingParams
from gapless.core.processor import LogitsProcessor
from gapless.core.request import Request
from gapless.errors import ConfigError, InvalidRequest, ModelNotFound
from gapless.models.source import ModelSource, resolve
from gapless.pipeline.engine import Engine
from gapless.text import load_tokenizer
from gapless.text.bad_words import in_tokens
from gapless.text.local_chat import LocalChat
from gapless.text.tokenizer import Tokenizer
from gapless.text.transcript import Transcript
from gapless.trace.files import TraceFiles

log = logging.getLogger(__name__)

Prompt = str | list[int] | tuple[int, ...]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one prompt: its first choice, and the others with `choices`."""

    text: str  # empty when the model has no tokenizer
    token_ids: tuple[int, ...]  # generated tokens, the stop token included
    finish_reason: str  # "stop", "length", "abort" or "error"
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache already had
    stop: str | None = None  # the stop string that ended the text
    error: str | None = None  # set when finish_reason is "error"
    logprobs: tuple[TokenLogprob, ...] | None = None  # one for each of token_ids, if asked for
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # one for each prompt token; the first is None
    others: tuple[Completion, ...] = ()  # with n above 1: all choices but this one

    @property
    def choices(self) -> tuple[Completion, ...]:
        """All n choices. The first is this completion."""
        return (self, *self.others)

    @property
    def failure(self) -> str | None:
        """The error of the first choice that has one."""
        return next((choice.error for choice in self.choices if choice.error is not None), None)


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed completion. The last one of all choices carries the completion."""

    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of token_ids, if asked for
    index: int = 0  # which of n choices this is a piece of


class Candidate:
    """One completion of a prompt on its way: its request, and what came of it so far."""

    def __init__(self, index: int, request: Request, transcript: Transcript, engine: Engine) -> None:
        self.index = index
        self.request = request
        self._transcript = transcript
        self._engine = engine

    def take(self, news: Progress | Finished) -> Delta:
        """Turn what the engine delivered into text; end the request when a stop string was found."""
        if isinstance(news, Finished):
            return self._finish(news)
        added = self._transcript.take((news.token,))
        if not added.token_ids:
            return Delta("", (), index=self.index)  # sampled before the engine learned of the stop
        if self._transcript.stop is not None:
            self._engine.abort(self.request.id, "stop")
        logprobs = () if news.logprob is None else (news.logprob,)
        return Delta(added.text, (news.token,), logprobs=logprobs, index=self.index)

    def _finish(self, news: Finished) -> Delta:
        request, transcript = self.request, self._transcript
        num_seen = len(transcript.token_ids)
        added = transcript.take(request.tokens[request.num_prompt + num_seen :].tolist(), news.reason)
        completion = Completion(
            text=transcript.text,
            token_ids=tuple(transcript.token_ids),
            finish_reason="stop" if transcript.stop is not None else news.reason,  # of this run
            prompt_token_ids=tuple(request.prompt.tolist()),
            num_cached_tokens=request.num_cached,
            stop=transcript.stop,
            error=str(news.error) if news.error is not None else None,
            logprobs=completion_logprobs(request, len(transcript.token_ids)),
            prompt_logprobs=prompt_logprobs(request),
        )
        logprobs = (completion.logprobs or ())[num_seen:]
        return Delta(added.text, tuple(added.token_ids), completion, logprobs, self.index)


class Job:
    """One prompt on its way: its candidates, and those that have ended."""

    def __init__(self, each: Sequence[Candidate], params: SamplingParams) -> None:
        self._candidates = {candidate.request.id: candidate for candidate in each}
        self._params = params
        self._ended: dict[int, Completion] = {}  # by index

    @property
    def requests(self) -> list[Request]:
        return [candidate.request for candidate in self._candidates.values()]

    def take(self, news: Progress | Finished) -> Delta:
        """What the engine delivered, as text. The completion comes when all candidates have ended."""
        delta = self._candidates[news.request.id].take(news)
        if delta.completion is None:
            return delta
        self._ended[delta.index] = delta.completion
        if len(self._ended) < len(self._candidates):
            return replace(delta, completion=None)
        first, *others = self._chosen()
        return replace(delta, completion=replace(first, others=tuple(others)) if others else first)

    def _chosen(self) -> list[Completion]:
        ended = [self._ended[index] for index in sorted(self._ended)]
        if not is_ranked(self._params):
            return ended
        found = best(ended, self._params.n, _score)
        return found if self._params.logprobs is not None else [replace(item, logprobs=None) for item in found]


def _score(completion: Completion) -> float:
    """A candidate that failed is the last choice."""
    return -inf if completion.error is not None else mean_logprob(completion.logprobs or ())


class Client:
    """An engine with a tokenizer."""

    def __init__(
        self,
        options: EngineOptions,
        progress: Callable[[int, int], None] | None = None,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self._trace = TraceFiles.at(options.trace) if isinstance(options.trace, str) else None
        source = resolve(options.model)
        self.tokenizer = _tokenizer(source)
        self._no_tokenizer = f"{source.name} has no tokenizer; give the prompt as token ids"
        self._chat: LocalChat | None = None
        if self.tokenizer is not None:
            self._chat = LocalChat(self.tokenizer, allow_special_tokens=options.allow_special_tokens)
        self.engine = Engine(options, source, progress, processors=processors)

    def close(self) -> None:
        """Stop the engine, and write its timeline if that was asked for. Can be called again.

        Does nothing in a forked process: the engine, the template process and the timeline are the parent's.
        """
        if not self.engine.in_this_process:
            return
        self.engine.close()
        if self._chat is not None:
            self._chat.close()
        files, self._trace = self._trace, None
        if files is not None:
            files.write([self.engine.monitor.timeline().trimmed()])

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """Token ids of a prompt. Raises InvalidRequest."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequest(self._no_tokenizer, "prompt")
            if not prompt:
                raise InvalidRequest("the prompt is empty; it needs at least one character", "prompt")
            self.tokenizer.check_length(prompt, self._most)
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, (list, tuple)) and set(map(type, prompt)) <= {int}:
            return prompt
        raise InvalidRequest(f"a prompt is text or a list of token ids, got {_excerpt(prompt)}", "prompt")

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **values: Any,
    ) -> Sequence[int]:
        """Token ids of a conversation, ready for the assistant's turn. `values` are the template's.

        Raises InvalidRequest.
        """
        if self._chat is None:
            raise InvalidRequest(self._no_tokenizer, "messages")
        self.engine.check_process()  # the template process answers one process
        return self._chat.encode(
            messages,
            self._most,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **values,
        )

    @property
    def _most(self) -> int:
        """Tokens of a prompt at most."""
        return self.engine.resolved.limits.max_model_len

    def prepare(
        self, tokens: Sequence[int], params: SamplingParams, *, streams: bool, shown_ids: Collection[int] = ()
    ) -> Job:
        """A job that is sure to be accepted. Stop strings need each token as it comes."""
        if params.stop and self.tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer; use stop_token_ids", "stop")
        if streams and is_ranked(params):
            raise InvalidRequest("best_of above n cannot be streamed: the best are known only at the end", "best_of")
        if params.bad_words:  # a copy is checked anew, which takes longer than the rest of this
            params = replace(params, bad_words=in_tokens(params.bad_words, self.tokenizer))
        make = self.engine.make_request
        requests = [make(tokens, each, streams=streams or bool(params.stop)) for each in candidates(params)]
        made = [(each, self._transcript(each, shown_ids)) for each in requests]
        return Job([Candidate(index, *each, self.engine) for index, each in enumerate(made)], params)

    def _transcript(self, request: Request, shown_ids: Collection[int]) -> Transcript:
        params = request.params
        return Transcript(
            self.tokenizer,
            params.stop,
            request.stop_ids,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
            shown=shown_ids,
        )


def _tokenizer(source: ModelSource) -> Tokenizer | None:
    """The model's tokenizer, if it has one; prompts of token ids do without."""
    try:
        return load_tokenizer(source)
    except ModelNotFound as error:
        log.warning("%s", error)
        return None


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def check_params(params: object) -> SamplingParams:
    """The default when None; raise InvalidRequest for anything else that is not SamplingParams."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"params must be SamplingParams, got {_excerpt(params)}", "params")
    return params


def check_compiled(grammar: Future[Any]) -> None:
    """Wait for a grammar. Raises InvalidRequest for one that cannot be used.

    The error is the caller's own. The compiler keeps the one that it found: raised again and again, that would gather
    the frames of all callers.
    """
    error = grammar.exception()
    if error is not None:
        raise InvalidRequest(str(error), getattr(error, "param", None))


def make_options(model: object, options: Mapping[str, Any]) -> EngineOptions:
    """Options from keyword arguments. Raises ConfigError."""
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError(f"model must be a name or a path, got {_excerpt(model)}")
    return EngineOptions.from_dict({"model": os.fspath(model), **options})
