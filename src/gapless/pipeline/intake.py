"""From a prompt and its parameters to a request, checked against the model and the engine's limits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gapless.core.limits import check_fits
from gapless.core.params import MAX_STOP_IDS, SamplingParams
from gapless.core.request import IntArray, Request, int_array
from gapless.errors import InvalidRequest
from gapless.runner.resolve import Resolved


def make_request(
    request_id: str,
    prompt: Sequence[int] | IntArray,
    params: SamplingParams,
    seed: int,
    resolved: Resolved,
    *,
    streams: bool = False,
    generated: Sequence[int] | IntArray = (),
) -> Request:
    """Raises InvalidRequest. With `generated` the request goes on after these tokens, which are not its prompt."""
    model, limits = resolved.model, resolved.limits
    _check_tokens(prompt, model.vocab_size, "prompt")
    _check_tokens(params.stop_token_ids, model.vocab_size, "stop_token_ids", empty=True)
    _check_top("logprobs", params.logprobs, model.vocab_size)
    _check_top("prompt_logprobs", params.prompt_logprobs, model.vocab_size)
    request = Request(
        id=request_id,
        prompt=int_array(prompt),
        params=params,
        seed=seed,
        stop_ids=_stop_ids(params, () if params.ignore_eos else model.eos_token_ids),
        limit=min(len(prompt) + params.max_tokens, limits.max_model_len),
        streams=streams,
    )
    check_fits(request, limits)
    if len(generated) > 0:
        _check_tokens(generated, model.vocab_size, "generated")
        request.resume_after(int_array(generated))
    return request


def _check_top(name: str, count: int | None, vocab_size: int) -> None:
    if (count or 0) > vocab_size:
        raise InvalidRequest(f"the {count} likeliest tokens of a vocabulary of {vocab_size} cannot be given", name)


def _stop_ids(params: SamplingParams, eos: Sequence[int]) -> tuple[int, ...]:
    stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
    if len(stop_ids) > MAX_STOP_IDS:
        message = f"{len(stop_ids)} stop and end-of-sequence tokens; at most {MAX_STOP_IDS}"
        raise InvalidRequest(message, "stop_token_ids")
    return stop_ids


def _check_tokens(tokens: Sequence[int] | IntArray, vocab_size: int, what: str, *, empty: bool = False) -> None:
    """Raise InvalidRequest unless all are ids of the vocabulary."""
    if len(tokens) == 0 and not empty:
        raise InvalidRequest(f"the {what} is empty; it needs at least one token", what)
    if isinstance(tokens, np.ndarray) and len(tokens) > 0 and tokens.min() >= 0 and tokens.max() < vocab_size:
        return
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            message = f"{what}: token id {token} at index {index} is not in the vocabulary of {vocab_size}"
            raise InvalidRequest(message, what)
