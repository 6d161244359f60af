"""Shrinks a failing schedule: fewer requests, fewer tokens, simpler options, as long as it still fails.

Tries one simplification after another and keeps each that still fails in the same way, until none does. Knows
schedules. The caller defines failing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from gapless.core.params import SamplingParams
from gapless.proof.schedule import Ask, Schedule


@dataclasses.dataclass(frozen=True, slots=True)
class Shrunk:
    """The smallest schedule found, and what it took."""

    schedule: Schedule
    num_tried: int


def shrink(
    schedule: Schedule,
    fails: Callable[[Schedule], bool],
    *,
    most_blocks: int,
    most_tries: int = 600,
    most_s: float = 60,
) -> Shrunk:
    """The smallest schedule that still fails. `most_blocks` limits the blocks of its size."""
    deadline = time.monotonic() + most_s
    tried: set[Schedule] = set()
    found = True
    while found:
        found = False
        for candidate in _simpler(schedule, most_blocks):
            if len(tried) >= most_tries or time.monotonic() > deadline:
                return Shrunk(schedule, len(tried))
            if candidate in tried or candidate == schedule:
                continue
            tried.add(candidate)
            if fails(candidate):
                schedule, found = candidate, True
                break
    return Shrunk(schedule, len(tried))


def _simpler(schedule: Schedule, most_blocks: int) -> Iterator[Schedule]:
    """Schedules a little simpler than this one, the boldest first."""
    yield from _fewer_asks(schedule)
    yield from _simpler_options(schedule, most_blocks)
    for index, ask in enumerate(schedule.asks):
        for simpler in _simpler_asks(ask):
            yield replace(schedule, asks=(*schedule.asks[:index], simpler, *schedule.asks[index + 1 :]))


def _fewer_asks(schedule: Schedule) -> Iterator[Schedule]:
    count = len(schedule.asks)
    size = count // 2
    while size >= 1:
        for start in range(0, count, size):
            rest = schedule.asks[:start] + schedule.asks[start + size :]
            if rest:
                yield replace(schedule, asks=rest)
        size //= 2


def _simpler_options(schedule: Schedule, most_blocks: int) -> Iterator[Schedule]:
    options: list[dict[str, Any]] = [{"failures": ()}, {"prefix_cache": False}, {"threads": False}, {"order": None}]
    options += [{"order": seed} for seed in (0, 1) if schedule.order is not None and seed < schedule.order]
    options += [{"depth": depth} for depth in (1, 2) if depth < schedule.depth]
    options += [{"num_blocks": most_blocks}] if schedule.num_blocks < most_blocks else []
    options += [{"num_rows": rows} for rows in (1, 2, len(schedule.asks)) if rows < schedule.num_rows]
    widest = max(len(ask.prompt) for ask in schedule.asks) + schedule.num_rows
    options += [{"max_batch_tokens": widest}] if schedule.max_batch_tokens < widest else []
    options += [{"failures": (step,)} for step in schedule.failures if len(schedule.failures) > 1]
    for changes in options:
        yield replace(schedule, **changes)


def _simpler_asks(ask: Ask) -> Iterator[Ask]:
    length, params = len(ask.prompt), ask.params
    if ask.abort is not None:
        yield replace(ask, abort=None)
    if ask.rule is not None:
        yield replace(ask, rule=None)
        yield replace(ask, rule=replace(ask.rule, over_after=None, fails_after=None))
    if ask.arrival > 0:
        yield replace(ask, arrival=0, abort=ask.abort and max(0, ask.abort - ask.arrival))
        yield replace(ask, arrival=ask.arrival // 2)
    for kept in sorted({1, length // 2, length - 1} - {0, length}):
        yield replace(ask, prompt=ask.prompt[:kept])
    for changes in _simpler_params(params):
        yield replace(ask, params=replace(params, **changes))
    if ask.stop_ids:
        yield replace(ask, stop_ids=(), params=replace(params, stop_token_ids=()))


def _simpler_params(params: SamplingParams) -> Iterator[dict[str, Any]]:
    plain: dict[str, Any] = {"prompt_logprobs": None, "logprobs": None, "stop": (), "min_tokens": 0}
    plain |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "top_n_sigma": 0.0}
    plain |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": ()}
    plain |= {"allowed_token_ids": None, "bad_token_ids": (), "bad_words": ()}
    for name, value in plain.items():
        if getattr(params, name) != value:
            yield {name: value}
    if params.temperature != 0:
        yield {"temperature": 0.0}
    least = max(1, params.min_tokens)
    for count in sorted({least, params.max_tokens // 2, params.max_tokens - 1}):
        if least <= count < params.max_tokens:
            yield {"max_tokens": count}
