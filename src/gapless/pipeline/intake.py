"""From a prompt and its parameters to a request, checked against the model and the engine's limits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gapless.core.limits import all_stop_ids, check_fits, check_tokens, check_vocabulary, most_new_tokens
from gapless.core.params import SamplingParams
from gapless.core.request import IntArray, Request, int_array
from gapless.guides.words import guide_of
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
    ids = _in_one_pass(prompt)
    check_tokens(ids, model.vocab_size, "prompt")
    check_vocabulary(params, model.vocab_size)
    request = Request(
        id=request_id,
        prompt=int_array(ids),
        params=params,
        seed=seed,
        stop_ids=all_stop_ids(params, model.eos_token_ids, model.vocab_size),
        limit=len(prompt) + most_new_tokens(len(prompt), params, limits),
        streams=streams,
        guide=guide_of(params, model.vocab_size),
    )
    check_fits(request, limits)
    if len(generated) > 0:
        check_tokens(generated, model.vocab_size, "generated")
        request.resume_after(int_array(generated))
    return request


def _in_one_pass(tokens: Sequence[int] | IntArray) -> Sequence[int] | npt.NDArray[np.int64]:
    """The tokens as an array. Its smallest and largest number are found at once, those of a long list are not."""
    try:
        return np.asarray(tokens, np.int64)
    except OverflowError:  # no token of any vocabulary: the check names it
        assert not isinstance(tokens, np.ndarray)
        return tokens
