"""The load of `gapless bench serve`: requests from a seed, and how they are sent.

A request's clock starts when the request was due, not when it could be sent, so that a slow server cannot hide its
queue.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gapless.bench.openai_client import Endpoint, Sample, complete
from gapless.bench.workload_jobs import WORKLOADS
from gapless.errors import ConfigError
from gapless.progress import Bar

WORDS = (
    *("time", "water", "light", "stone", "river", "paper", "music", "garden"),
    *("number", "window", "letter", "morning", "machine", "forest", "silver", "answer"),
)
FIRST_ID = 10


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of the load."""

    prompt: str | list[int]
    max_tokens: int
    delay_s: float  # after the load began; 0 with a fixed concurrency


def make_load(args: argparse.Namespace, vocab_size: int) -> list[LoadRequest]:
    """The requests: those of a workload, or from the seed."""
    draw = random.Random(args.load_seed)
    if args.workload is not None:
        work = WORKLOADS[args.workload]
        delays = _arrivals(draw, args.rate, work.num_requests)
        requests = zip(work.prompts(), work.counts(), delays, strict=True)
        return [LoadRequest(*request) for request in requests][: args.requests]
    inputs, outputs = read_range("--input-length", args.input_length), read_range("--output-length", args.output_length)
    asks, delay_s = [], 0.0
    for _ in range(args.requests):
        length = draw.randint(*inputs)
        ids = [draw.randrange(min(FIRST_ID, vocab_size - 1), vocab_size) for _ in range(length)]
        prompt = ids if args.prompts == "ids" else " ".join(WORDS[id % len(WORDS)] for id in ids)
        asks.append(LoadRequest(prompt, draw.randint(*outputs), delay_s))
        delay_s += draw.expovariate(args.rate) if args.rate else 0.0
    return asks


def _arrivals(draw: random.Random, rate: float | None, count: int) -> list[float]:
    gaps = [draw.expovariate(rate) if rate else 0.0 for _ in range(count)]
    return [0.0, *itertools.accumulate(gaps[1:])]


def read_range(flag: str, text: str) -> tuple[int, int]:
    """N or LOW-HIGH. Raises ConfigError."""
    low, _, high = text.partition("-")
    if not low.isdigit() or (high and not high.isdigit()) or not 1 <= int(low) <= int(high or low):
        raise ConfigError(f"{flag} must be N or LOW-HIGH with 1 <= LOW <= HIGH, got {text!r}")
    return int(low), int(high or low)


def body_of(ask: LoadRequest, model: str, number: int, *, ignore_eos: bool, ids: bool) -> dict[str, Any]:
    """The wire format of a request."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:
        body["ignore_eos"] = True
    if ids:
        body["return_token_ids"] = True  # so that a model without a tokenizer streams too
    return body


async def run_load(
    endpoint: Endpoint,
    bodies: Sequence[dict[str, Any]],
    asks: Sequence[LoadRequest],
    args: argparse.Namespace,
    bar: Bar,
) -> list[Sample]:
    """Send all requests; return samples in their order."""
    began_s = time.perf_counter()
    free = asyncio.Semaphore(len(asks) if args.rate else args.concurrency)

    async def one(ask: LoadRequest, body: dict[str, Any]) -> Sample:
        await asyncio.sleep(began_s + ask.delay_s - time.perf_counter())
        async with free:
            due_s = began_s + ask.delay_s if args.rate else time.perf_counter()
            sample = await complete(endpoint, body, due_s, args.timeout)
        bar.advance(1, sample.num_output_tokens)
        return sample

    return list(await asyncio.gather(*(one(ask, body) for ask, body in zip(asks, bodies, strict=True))))
