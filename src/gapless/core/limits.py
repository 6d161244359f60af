"""The capacity of the engine, and every check of a request against it and against the model's vocabulary.

The engine's intake, the scheduler and the server call these checks and have none of their own. The code that sizes the
memory makes the limits, and the scheduler respects them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gapless.core.baggage import most_baggage
from gapless.core.params import MAX_BIASES, MAX_STOP_IDS, SamplingParams
from gapless.core.request import Request
from gapless.core.windows import NO_WINDOWS, Windows, most_blocks, most_entries
from gapless.errors import InvalidRequest, PromptTooLong


@dataclass(frozen=True, slots=True)
class Limits:
    """The resources that the scheduler may use."""

    num_rows: int
    num_blocks: int
    block_size: int
    max_batch_tokens: int
    max_model_len: int
    prefix_cache: bool = True
    windows: Windows = NO_WINDOWS  # of each group of layers

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def max_blocks(self) -> int:
        """Most entries of one block table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def max_found_blocks(self) -> int:
        """Once a plan has this many table entries, no further request is admitted."""
        return 4 * self.max_blocks

    @property
    def max_new_blocks(self) -> int:
        """Table entries that one plan can hold: those above, a request's whole table, and a step's growth."""
        return 5 * self.max_blocks + 2 * self.num_rows + self.max_batch_tokens // self.block_size

    @property
    def max_baggage(self) -> int:
        """Numbers that new owners may bring to one plan beside their seats: any one request's, and a step's tokens."""
        return most_baggage(self.max_model_len, MAX_BIASES) + most_baggage(self.max_batch_tokens, 0)

    def most_blocks(self, num_tokens: int, num_cached: int) -> int:
        """Blocks that a row of so many known tokens takes while those behind the cached ones are fed.

        If there are not as many, chunks are shorter.
        """
        at_once = min(num_tokens - num_cached, self.max_batch_tokens)
        return min(most_blocks(num_tokens, at_once, self.windows, self.block_size), self.num_blocks)


class HasRoom(Protocol):
    """Where a request must fit: an engine's limits, or what a server knows of them."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def windows(self) -> Windows: ...


def most_tokens(limits: HasRoom) -> int:
    """Tokens of one request at most, prompt and output together."""
    longest, size = limits.max_model_len, limits.block_size
    return min(longest, most_entries(limits.num_blocks, -(-longest // size), limits.windows, size) * size)


def most_new_tokens(num_prompt: int, params: SamplingParams, limits: HasRoom) -> int:
    """Tokens that a request may generate: as many as it asks for, or as the model's context has left."""
    return min(params.max_tokens, limits.max_model_len - num_prompt)


def check_room(num_prompt: int, num_new: int, limits: HasRoom) -> None:
    """Raise InvalidRequest for an empty prompt, and for one that even alone does not fit with this many new tokens."""
    if num_prompt == 0:
        raise InvalidRequest("the prompt is empty; it needs at least one token", "prompt")
    most, wanted = most_tokens(limits), num_prompt + num_new
    if wanted > most:
        groups = f" for {len(limits.windows)} groups of layers" if len(limits.windows) > 1 else ""
        blocks = f"{most} tokens ({limits.num_blocks} blocks of {limits.block_size}{groups})"
        advice = f" The KV cache has room for {blocks}: lower max_tokens, or raise num_blocks or kv_memory."
        given = f"{wanted} tokens ({num_prompt} in the prompt and {num_new} to generate)"
        raise PromptTooLong(most, given, advice if most < limits.max_model_len else "")


def check_fits(request: Request, limits: Limits) -> None:
    """Raise InvalidRequest for a request that could never run, even alone."""
    check_room(request.num_prompt, max(request.limit - request.num_prompt, 1), limits)


def check_tokens(tokens: Sequence[int] | npt.NDArray[np.signedinteger], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest unless all are ids of the vocabulary."""
    if len(tokens) == 0:
        return
    low, high = (tokens.min(), tokens.max()) if isinstance(tokens, np.ndarray) else (min(tokens), max(tokens))
    if low < 0 or high >= vocab_size:
        index, token = next((i, token) for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
        message = f"{param}: token id {token} at index {index} is not in the vocabulary of {vocab_size}"
        raise InvalidRequest(message, param)


def check_top(count: int | None, vocab_size: int, param: str) -> None:
    """Raise InvalidRequest for more of the likeliest tokens than there are."""
    if (count or 0) > vocab_size:
        raise InvalidRequest(f"the {count} likeliest tokens of a vocabulary of {vocab_size} cannot be given", param)


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest for parameters that this vocabulary cannot follow."""
    check_top(params.logprobs, vocab_size, "logprobs")
    check_top(params.prompt_logprobs, vocab_size, "prompt_logprobs")
    check_tokens([token for token, _ in params.logit_bias], vocab_size, "logit_bias")
    check_tokens(params.allowed_token_ids or (), vocab_size, "allowed_token_ids")
    check_tokens(params.bad_token_ids, vocab_size, "bad_token_ids")
    for word in params.bad_words:
        check_tokens(() if isinstance(word, str) else word, vocab_size, "bad_words")


def all_stop_ids(params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The tokens that end a request: its own and the model's. Raises InvalidRequest."""
    check_tokens(params.stop_token_ids, vocab_size, "stop_token_ids")
    found = tuple(dict.fromkeys((*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids)))
    if len(found) > MAX_STOP_IDS:
        message = f"{len(found)} stop and end-of-sequence tokens; at most {MAX_STOP_IDS}"
        raise InvalidRequest(message, "stop_token_ids")
    return found
