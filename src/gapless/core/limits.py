"""The capacity of the engine, and the check before the queue that a request fits.

Numbers only. The code that sizes the memory makes them, and the scheduler respects them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gapless.core.request import Request
from gapless.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """The resources that the scheduler may use."""

    num_rows: int
    num_blocks: int
    block_size: int
    max_batch_tokens: int
    max_model_len: int
    prefix_cache: bool = True

    @property
    def max_blocks(self) -> int:
        """Most blocks of one row."""
        return -(-self.max_model_len // self.block_size)

    @property
    def max_found_blocks(self) -> int:
        """Once a plan has this many table entries, no further request is admitted."""
        return 4 * self.max_blocks

    @property
    def max_new_blocks(self) -> int:
        """Table entries that one plan can hold: those above, a request's whole table, and a step's growth."""
        return 5 * self.max_blocks + 2 * self.num_rows + self.max_batch_tokens // self.block_size


def check_fits(request: Request, limits: Limits) -> None:
    """Raise InvalidRequest for a request that could never run, even alone."""
    room = limits.num_blocks * limits.block_size
    if request.num_prompt + 1 > limits.max_model_len:
        raise InvalidRequest(
            f"the prompt has {request.num_prompt} tokens; with max_model_len {limits.max_model_len} "
            f"it may have at most {limits.max_model_len - 1}, so that one can be generated"
        )
    if request.limit > room:
        raise InvalidRequest(
            f"prompt and max_tokens together need {request.limit} tokens of KV cache; there is room for {room} "
            f"({limits.num_blocks} blocks of {limits.block_size}); lower max_tokens or raise num_blocks or kv_memory"
        )
