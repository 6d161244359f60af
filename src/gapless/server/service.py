"""The work of the server, without HTTP: it checks and tokenizes, admits or refuses, and starts generations.

Owns the queue's bound, the deadline and the names of the model. Everything that a client can get wrong is found here,
before the first byte of an answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gapless.core.choices import candidates, num_candidates
from gapless.core.limits import all_stop_ids, check_room, check_tokens, check_top, check_vocabulary, most_tokens
from gapless.core.params import SamplingParams
from gapless.errors import InvalidRequest
from gapless.server.checked_shapes import CheckedShapes
from gapless.server.engines import Engines
from gapless.server.errors import ApiError, refused, shutting_down
from gapless.server.generation import Choice, Generation
from gapless.server.logprobs import TokenTexts
from gapless.server.messages import Ready
from gapless.server.options import ServerOptions
from gapless.server.prompts import PromptWriter
from gapless.server.protocol import Choosing, Sampling
from gapless.server.render_pool import RenderPool
from gapless.server.roster import Flight
from gapless.server.shapes import shape_of
from gapless.text.bad_words import in_tokens
from gapless.text.reply import find_reply_format
from gapless.text.tokenizer import Tokenizer
from gapless.text.transcript import Transcript

log = logging.getLogger(__name__)
RETRY_AFTER_S = 1
SHARED = (  # parameters that have the same name in a body and in SamplingParams
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "logprobs_mode",
    "typical_p",
    "top_n_sigma",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_token_ids",
    "bad_words",
    "seed",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request, and what it belongs to."""

    client: str  # its key, or its address
    session: str | None = None  # requests of one session go to the same engine, if there are several


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """One prompt to continue."""

    prompt: Sequence[int]
    params: SamplingParams
    shows_tokens: bool = True
    tells_all: bool = True  # log-probabilities of tokens that are no part of the text too
    by_default: bool = False  # max_tokens is the server's default, not the client's wish
    shown: Collection[int] = ()  # special tokens that are part of the text, for who reads tags in it


class Service:
    """The model, open to requests."""

    def __init__(
        self,
        options: ServerOptions,
        engines: Engines,
        tokenizer: Tokenizer | None,
        renderer: RenderPool,
        names: Sequence[str],
        *,
        allow_special_tokens: bool = False,
    ) -> None:
        self.options = options
        self.engines = engines
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.names = tuple(names)
        self._token_texts = {by_id: TokenTexts(tokenizer, by_id=by_id) for by_id in (False, True)}
        reply = find_reply_format(tokenizer, options.tool_format, options.reasoning_format) if tokenizer else None
        self.prompts = PromptWriter(
            tokenizer, renderer, reply, lambda: self.info.max_model_len, allow_special_tokens=allow_special_tokens
        )
        self._shapes = CheckedShapes(engines, lambda: self.draining)
        self.created = int(time.time())
        self.draining = False
        self._clients: dict[int, str] = {}  # of flights that are not over, by id
        self._num_of_client: Counter[str] = Counter()
        self._by_default: set[int] = set()  # flights whose limit is the server's default
        self.on_default_limit: Callable[[], None] = lambda: None
        engines.on_over.append(self._forget)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def info(self) -> Ready:
        """The engine's description of itself. Raises ApiError while it loads for the first time."""
        if self.engines.info is None:
            raise ApiError(503, "the model is loading", code="loading", retry_after_s=RETRY_AFTER_S)
        return self.engines.info

    def not_ready(self) -> str | None:
        """Why requests would not be served now, or None."""
        if self.draining:
            return "draining"
        if not self.engines.is_ready:
            return "loading" if self.engines.info is None else "restarting"
        return "recovering" if self.engines.in_quarantine else None

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError for one that is not served."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ApiError(404, f"the model {name!r} does not exist", param="model", code="model_not_found")
        return name

    # -- text --------------------------------------------------------------------------------------------------------

    def tokenizer_info(self) -> dict[str, Any]:
        """Facts with which clients can tokenize and write prompts on their own. Raises ApiError."""
        tokenizer = self.prompts.tokenizer
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": self.info.max_model_len,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "eos_token_ids": list(self.info.eos_token_ids),
            "special_tokens": {str(id): tokenizer.id_to_token(id) for id in sorted(tokenizer.special_ids)},
            "chat_template": tokenizer.chat_template,
        }

    def token_texts(self, by_id: bool | None = False) -> TokenTexts:
        return self._token_texts[bool(by_id)]

    # -- checks ------------------------------------------------------------------------------------------------------

    def check_logprobs(self, count: int | None, *, param: str) -> None:
        """Raise ApiError for more of the likeliest tokens than can be told."""
        if (count or 0) > self.options.max_logprobs:
            raise ApiError(400, f"{param} is {count}; the server allows {self.options.max_logprobs}", param=param)
        with refused():
            check_top(count, self.info.vocab_size, param)

    def check_prompt_logprobs(self, body: Choosing) -> None:
        """Raise ApiError unless the prompt's log-probabilities can be told."""
        self.check_logprobs(body.prompt_logprobs, param="prompt_logprobs")
        if body.prompt_logprobs is not None and body.stream:
            raise ApiError(400, "prompt_logprobs are not told in a stream", param="prompt_logprobs")

    def params(
        self, body: Sampling, max_tokens: int, stop: str | list[str] | None, **more: int | None
    ) -> SamplingParams:
        """Sampling parameters from the wire; `more` are those that not every body has by that name. Raises ApiError."""
        options = self.options
        if max_tokens > options.max_output_tokens:
            message = f"max_tokens is {max_tokens}; the server allows {options.max_output_tokens}"
            raise ApiError(400, message, param="max_tokens")
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > options.max_stop or any(len(text) > options.max_stop_length for text in stops):
            limit = f"at most {options.max_stop} stop strings of at most {options.max_stop_length} characters"
            raise ApiError(400, limit, param="stop")
        if stops and self.tokenizer is None:
            raise ApiError(400, "stop strings need a tokenizer, which the model does not have", param="stop")
        given = {name: getattr(body, name) for name in SHARED} | more
        values = {name: value for name, value in given.items() if value is not None}
        if values.get("top_k") == -1:
            values["top_k"] = 0
        with refused():
            shape = shape_of(body)
            if shape is not None and self.tokenizer is None:
                raise InvalidRequest(f"{shape.param} needs a tokenizer, which the model does not have", shape.param)
            params = SamplingParams.from_dict({"structured": shape, **values, "max_tokens": max_tokens, "stop": stops})
            params = replace(params, bad_words=in_tokens(params.bad_words, self.tokenizer))
            check_vocabulary(params, self.info.vocab_size)
            all_stop_ids(params, self.info.eos_token_ids, self.info.vocab_size)
        return params

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raise ApiError unless all are ids of the vocabulary."""
        with refused(param):
            check_tokens(tokens, self.info.vocab_size, param)

    def room_for(self, prompt: Sequence[int], max_tokens: int | None, *, param: str) -> int:
        """How many tokens may be generated after this prompt: as many as asked for, or the default if that fits."""
        with refused(param):
            check_room(len(prompt), max_tokens if max_tokens is not None else 1, self.info)
        if max_tokens is not None:
            return max_tokens
        return min(most_tokens(self.info) - len(prompt), self.options.default_limit)

    # -- generation --------------------------------------------------------------------------------------------------

    def check_choices(self, num_prompts: int, body: Choosing) -> None:
        """Raise ApiError for too many, and for a stream of the best; before each prompt costs time."""
        n, best_of = body.n or 1, body.best_of or 0
        for name, count in (("n", n), ("best_of", best_of)):
            if count > self.options.max_n:
                raise ApiError(400, f"{name} is {count}; the server allows {self.options.max_n}", param=name)
        if best_of > n and body.stream:
            raise ApiError(400, "best_of above n cannot be streamed", param="best_of")
        total = num_prompts * max(n, best_of)
        if total > self.options.max_choices:
            message = f"{total} choices; the server allows {self.options.max_choices}"
            raise ApiError(400, message, param="n" if num_prompts == 1 else "prompt")

    async def start(self, plans: Sequence[PromptPlan], timeout_s: float | None, caller: Caller) -> Generation:
        """Send each candidate of each prompt to the engine. Raises ApiError when there is no room for them.

        And when a grammar cannot be used: that is known before the first byte of an answer.
        """
        client = caller.client
        count = sum(num_candidates(plan.params) for plan in plans)
        limit_s = min(timeout_s or self.options.request_timeout, self.options.request_timeout)
        deadline_s = asyncio.get_running_loop().time() + limit_s
        self._admit(count, client)
        await self._shapes.check_all((plan.params.structured for plan in plans), deadline_s)
        self._admit(count, client)
        changed = asyncio.Event()
        choices: list[Choice] = []
        for plan in plans:
            for params in candidates(plan.params):
                flight = self.engines.submit(plan.prompt, params, changed, caller.session)
                self._clients[flight.id] = client
                self._num_of_client[client] += 1
                if plan.by_default:
                    self._by_default.add(flight.id)
                choices.append(self._choice(len(choices), plan, flight))
        return Generation(self.engines, choices, changed, deadline_s, plans[0].params)

    def _choice(self, index: int, plan: PromptPlan, flight: Flight) -> Choice:
        params = flight.params
        transcript = Transcript(
            self.tokenizer,
            params.stop,
            all_stop_ids(params, self.info.eos_token_ids, self.info.vocab_size),
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
            tells_starts=params.logprobs is not None,
            shown=plan.shown,
        )
        return Choice(index, flight, transcript, shows_tokens=plan.shows_tokens, tells_all=plan.tells_all)

    def _forget(self, flight: Flight) -> None:
        self._note_default_limit(flight)
        client = self._clients.pop(flight.id)
        self._num_of_client[client] -= 1
        if not self._num_of_client[client]:
            del self._num_of_client[client]

    def _note_default_limit(self, flight: Flight) -> None:
        """Nobody asked for the end of this text: tell the operator of it."""
        by_default = flight.id in self._by_default
        self._by_default.discard(flight.id)
        is_cut = flight.over is not None and flight.over.reason == "length"
        if by_default and is_cut and len(flight.tokens) == self.options.default_limit:
            log.info("ended by default_max_tokens: %d tokens", len(flight.tokens), extra={"flight": flight.id})
            self.on_default_limit()

    def _admit(self, count: int, client: str) -> None:
        if self.draining:
            raise shutting_down()
        allowed, most = self.options.max_per_client, self.engines.num_rows + self.options.max_queue
        if count > (room := min(most, allowed or most)):  # now and at any other time
            raise ApiError(400, f"{count} choices; the server has room for {room}", param="n")
        if (there := len(self.engines.unfinished())) + count > most:
            message = f"{there} requests run or wait; with these {count} more than the {most} that may"
            raise ApiError(429, message, code="queue_full", retry_after_s=RETRY_AFTER_S)
        if allowed and (own := self._num_of_client[client]) + count > allowed:
            message = f"{own} of your requests run or wait; with these {count} more than the {allowed} that may"
            raise ApiError(429, message, code="client_queue_full", retry_after_s=RETRY_AFTER_S)
