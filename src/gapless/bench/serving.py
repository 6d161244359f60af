"""`gapless bench serve`: load on an OpenAI endpoint, Gapless's or a peer's, and how long its clients waited.

Arrivals are open-loop (Poisson, `--rate`) or a fixed number at a time (`--concurrency`). Without `--url` a Gapless
server is started for the run; `--idle` then also does the same requests offline and compares the device's idle shares.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gapless.bench.load import Ask, body_of, make_load, run_load
from gapless.bench.openai_client import Endpoint, Sample, complete, fetch
from gapless.bench.own_server import own_server, settled_busy
from gapless.bench.waits import Summary, format_summary, summarize
from gapless.config import EngineOptions
from gapless.errors import ConfigError
from gapless.progress import progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `gapless bench serve`, besides the engine's own."""
    add = parser.add_argument
    add("--url", help="an OpenAI endpoint such as http://127.0.0.1:8000; default: a Gapless server for this run")
    add("--api-key", help="key of the endpoint")
    add("--served-model", help="model to ask the endpoint for; default: the first it lists")
    add("--requests", type=int, default=64, help="requests in all (default: %(default)s)")
    add("--concurrency", type=int, default=16, help="requests at the same time (default: %(default)s)")
    add("--rate", type=float, help="instead: requests a second, at random moments (Poisson)")
    add(
        "--input-length",
        default="32-128",
        help="words or ids of a prompt: N or LOW-HIGH (default: %(default)s)",
    )
    add("--output-length", default="32-64", help="tokens of an answer: N or LOW-HIGH (default: %(default)s)")
    add("--prompts", choices=("text", "ids"), default="text", help="what prompts are made of (default: %(default)s)")
    add("--load-seed", type=int, default=0, help="where lengths, prompts and arrivals come from (default: 0)")
    add("--slo-ttft", type=float, default=1000.0, help="ms to the first token that are good (default: %(default)s)")
    add("--slo-tpot", type=float, default=100.0, help="ms per further token that are good (default: %(default)s)")
    add("--timeout", type=float, default=600.0, help="seconds for one request (default: %(default)s)")
    add("--no-ignore-eos", action="store_true", help="let answers end by themselves; for endpoints without ignore_eos")
    add("--idle", action="store_true", help="compare the device's idle share with an offline run of the same requests")
    add("--json", metavar="FILE", help="write all numbers here")
    add("--plot", metavar="FILE.svg", help="draw the distributions here")


@dataclass(frozen=True, slots=True)
class Idle:
    """Share of the time in which the device did nothing, between the first request and the last answer."""

    served: float
    offline: float

    @property
    def difference(self) -> float:
        return self.served - self.offline


def offline_idle(engine: EngineOptions, asks: Sequence[Ask]) -> float:
    """Idle share of the same requests, all at once, without a server."""
    from gapless.core.params import SamplingParams
    from gapless.llm import LLM

    params = [SamplingParams(max_tokens=ask.max_tokens, temperature=0, ignore_eos=True) for ask in asks]
    with LLM(**asdict(engine)) as llm:
        prompts = [ask.prompt for ask in asks]
        llm.generate(prompts[:1], params[:1])
        before = llm.stats()
        llm.generate(prompts, params)
        spent = llm.stats() - before
    return 1 - spent.busy_s / spent.time_s


# -- the command -------------------------------------------------------------------------------------------------------


def main(args: argparse.Namespace, engine: EngineOptions) -> int:
    """Run the load and show what came of it; 1 when any request failed."""
    _check(args)
    with contextlib.ExitStack() as stack:
        url = args.url or stack.enter_context(own_server(engine, args.requests))
        summary, asks, samples, served = asyncio.run(_measure(Endpoint.from_url(url, args.api_key), args))
    slo = f"{args.slo_ttft:g} ms to the first and {args.slo_tpot:g} ms per further token"
    print(format_summary(summary, slo))
    idle = None
    if args.idle:
        idle = Idle(served, offline_idle(engine, asks))
        points = 100 * idle.difference
        print(f"device idle: {idle.served:.2%} served, {idle.offline:.2%} offline, {points:+.2f} points")
    _write(args, summary, samples, idle)
    return 1 if summary.num_errors else 0


async def _measure(endpoint: Endpoint, args: argparse.Namespace) -> tuple[Summary, list[Ask], list[Sample], float]:
    try:
        model = args.served_model or (await fetch(endpoint, "/v1/models"))["data"][0]["id"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{endpoint.host}:{endpoint.port} does not list its models: {error}") from error
    ours = args.url is None
    vocab_size = (await fetch(endpoint, "/state?seconds=0"))["vocab_size"] if ours else 10_000
    asks = make_load(args, vocab_size)
    ids = ours and args.prompts == "ids"
    bodies = [body_of(ask, model, i, ignore_eos=not args.no_ignore_eos, ids=ids) for i, ask in enumerate(asks)]
    await complete(endpoint, bodies[0] | {"max_tokens": 2}, time.perf_counter(), args.timeout)  # warms both ends up
    async with _idle_share(endpoint, ours) as idle:
        with progress_bar("requests", len(asks), unit="req") as bar:
            samples = await run_load(endpoint, bodies, asks, args, bar)
    return summarize(samples, args.slo_ttft, args.slo_tpot), asks, samples, idle[0]


@contextlib.asynccontextmanager
async def _idle_share(endpoint: Endpoint, ours: bool) -> AsyncIterator[list[float]]:
    """In the block: the share of its time in which the device of our own server idled; one element, set at the end."""
    found = [0.0]
    if not ours:
        yield found
        return
    _, busy_before_s = await settled_busy(endpoint)
    began_s = time.perf_counter()
    yield found
    seconds = time.perf_counter() - began_s
    _, busy_s = await settled_busy(endpoint)
    found[0] = 1 - (busy_s - busy_before_s) / seconds


def _check(args: argparse.Namespace) -> None:
    for name in ("requests", "concurrency"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.rate is not None and args.rate <= 0:
        raise ConfigError(f"--rate must be above 0, got {args.rate}")
    if args.idle and args.url is not None:
        raise ConfigError("--idle needs a server of its own: leave --url out")
    for path in (args.json, args.plot):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{path}: cannot be written: no such folder")


def _write(args: argparse.Namespace, summary: Summary, samples: Sequence[Sample], idle: Idle | None) -> None:
    if args.json is not None:
        from gapless.bench.machine import this_machine

        found = {
            "arguments": {name: value for name, value in vars(args).items() if name not in ("handler", "api_key")},
            "machine": asdict(this_machine()),
            "summary": asdict(summary),
            "idle": asdict(idle) if idle is not None else None,
            "requests": [
                {"ttft_s": s.ttft_s, "tpot_s": s.tpot_s, "whole_s": s.whole_s, "error": s.error} for s in samples
            ],
        }
        Path(args.json).write_text(json.dumps(found, indent=1) + os.linesep)
    if args.plot is not None:
        from gapless.bench.serving_chart import draw

        Path(args.plot).write_text(
            draw(samples, f"{summary.num_requests} requests, {summary.requests_per_s:.2f} a second")
        )
