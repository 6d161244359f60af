"""`gapless bench serve`: puts load on an OpenAI endpoint, Gapless's or a peer's, and measures its latency.

Arrivals are open-loop (Poisson, `--rate`) or a fixed number at a time (`--concurrency`). Without `--url` a Gapless
server is started for the run. `--idle` then also runs the same requests offline and compares the device's idle shares.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from gapless.bench.idle import Idle, format_idle, offline, watched
from gapless.bench.load import LoadRequest, body_of, make_load, run_load
from gapless.bench.openai_client import Endpoint, Sample, complete, fetch
from gapless.bench.own_server import own_server
from gapless.bench.waits import Summary, format_part, format_summary, split, summarize
from gapless.bench.workload_jobs import WORKLOADS
from gapless.config import EngineOptions
from gapless.errors import ConfigError
from gapless.progress import progress_bar

NUM_REQUESTS = 64
INPUT_LENGTH, OUTPUT_LENGTH = "32-128", "32-64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `gapless bench serve`, besides the engine's own."""
    add = parser.add_argument
    add("--url", help="an OpenAI endpoint such as http://127.0.0.1:8000; default: a Gapless server for this run")
    add("--api-key", help="key of the endpoint")
    add("--served-model", help="name of the model at the endpoint; default: the first it lists")
    add(
        "--workload",
        metavar="X",
        help="send the requests of a GPU workload, prompts as ids; without --url to its model, with random weights",
    )
    add("--first", type=int, default=0, metavar="N", help="also report the first N answers of the server on their own")
    add("--requests", type=int, help="requests in all (default: 64; with --workload: all that it has)")
    add("--concurrency", type=int, default=16, help="requests at the same time (default: %(default)s)")
    add("--rate", type=float, help="requests a second with Poisson arrivals, instead of a fixed concurrency")
    add(
        "--input-length",
        default=INPUT_LENGTH,
        help="words or ids of a prompt: N or LOW-HIGH (default: %(default)s)",
    )
    add("--output-length", default=OUTPUT_LENGTH, help="tokens of an answer: N or LOW-HIGH (default: %(default)s)")
    add("--prompts", choices=("text", "ids"), default="text", help="type of the prompts (default: %(default)s)")
    add("--load-seed", type=int, default=0, help="seed of lengths, prompts and arrivals (default: 0)")
    add("--slo-ttft", type=float, default=1000.0, help="goodput limit: ms to the first token (default: %(default)s)")
    add("--slo-tpot", type=float, default=100.0, help="goodput limit: ms per further token (default: %(default)s)")
    add("--timeout", type=float, default=600.0, help="seconds for one request (default: %(default)s)")
    add(
        "--no-ignore-eos",
        action="store_true",
        help="let answers end at the end of sequence; for endpoints without ignore_eos",
    )
    add("--idle", action="store_true", help="compare the device's idle share with an offline run of the same requests")
    add("--json", metavar="FILE", help="write all figures to this file")
    add("--plot", metavar="FILE.svg", help="draw the distributions to this file")


def main(args: argparse.Namespace, engine: EngineOptions) -> int:
    """Run the load and show the results; 1 when any request failed."""
    _check(args)
    if args.workload is not None:
        _check_workload(args, engine)
    elif args.requests is None:
        args.requests = NUM_REQUESTS
    with tempfile.TemporaryDirectory() as folder:
        return _run(args, engine if args.workload is None else _set_workload(args, engine, folder))


def _run(args: argparse.Namespace, engine: EngineOptions) -> int:
    with contextlib.ExitStack() as stack:
        url = args.url or stack.enter_context(own_server(engine, args.requests))
        asks, samples, served = asyncio.run(_measure(Endpoint.from_url(url, args.api_key), args))
    summary = summarize(samples, args.slo_ttft, args.slo_tpot)
    print(format_summary(summary, f"{args.slo_ttft:g} ms to the first and {args.slo_tpot:g} ms per further token"))
    parts = split(samples, args.first, args.slo_ttft, args.slo_tpot) if args.first else {}
    print(*(format_part(name, part) for name, part in parts.items()), sep="\n", end="\n" if parts else "")
    runs: dict[str, Idle] = {}
    if served:
        from gapless.report import idle_line  # loads torch

        runs["served"] = served[0]
        print(idle_line(served[0].by_cause, served[0].seconds))
    if args.idle:
        runs["offline"] = offline(engine, asks)
        print(format_idle(**runs))
    _write(args, {"summary": summary, **parts}, samples, runs)
    return 1 if summary.num_errors else 0


async def _measure(endpoint: Endpoint, args: argparse.Namespace) -> tuple[list[LoadRequest], list[Sample], list[Idle]]:
    try:
        model = args.served_model or (await fetch(endpoint, "/v1/models"))["data"][0]["id"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{endpoint.host}:{endpoint.port} does not list its models: {error}") from error
    ours = args.url is None
    vocab_size = (await fetch(endpoint, "/state?seconds=0"))["vocab_size"] if ours else 10_000
    asks = make_load(args, vocab_size)
    ids = ours and args.prompts == "ids"
    bodies = [body_of(ask, model, i, ignore_eos=not args.no_ignore_eos, ids=ids) for i, ask in enumerate(asks)]
    if not args.first:
        await complete(endpoint, bodies[0] | {"max_tokens": 2}, time.perf_counter(), args.timeout)  # warms both ends up
    async with contextlib.AsyncExitStack() as stack:
        idle = await stack.enter_async_context(watched(endpoint)) if ours else []
        with progress_bar("requests", len(asks), unit="req") as bar:
            samples = await run_load(endpoint, bodies, asks, args, bar)
    return asks, samples, idle


def _check(args: argparse.Namespace) -> None:
    for name in ("requests", "concurrency"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.first < 0:
        raise ConfigError(f"--first must be at least 0, got {args.first}")
    for name in ("rate", "timeout", "slo_ttft", "slo_tpot"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:  # not-a-number is neither
            raise ConfigError(f"--{name.replace('_', '-')} must be a number above 0, got {value:g}")
    if args.idle and args.url is not None:
        raise ConfigError("--idle needs a server of its own: leave --url out")
    for path in (args.json, args.plot):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{path}: cannot be written: no such folder")
        if path is not None and Path(path).is_dir():
            raise ConfigError(f"{path}: cannot be written: it is a folder")


def _check_workload(args: argparse.Namespace, engine: EngineOptions) -> None:
    known = [name for name, work in WORKLOADS.items() if len(work.sampling()) == 1]
    if args.workload not in known:
        raise ConfigError(f"--workload: unknown or not greedy: {args.workload!r}; known: {', '.join(known)}")
    num_requests = WORKLOADS[args.workload].num_requests
    if args.requests is not None and args.requests > num_requests:
        raise ConfigError(f"--requests: workload {args.workload} has {num_requests}, got {args.requests}")
    chosen = {
        "--model": engine.model != EngineOptions().model,
        "--input-length": args.input_length != INPUT_LENGTH,
        "--output-length": args.output_length != OUTPUT_LENGTH,
    }
    for flag in (flag for flag, is_set in chosen.items() if is_set):
        raise ConfigError(f"{flag} does not go with --workload, which sets it")


def _set_workload(args: argparse.Namespace, engine: EngineOptions, folder: str) -> EngineOptions:
    """Set the load to a workload's; the options of an engine that runs its model."""
    from gapless.bench.workloads import write_model

    work = WORKLOADS[args.workload]
    args.requests, args.prompts = args.requests or work.num_requests, "ids"
    return replace(
        engine,
        model=str(write_model(Path(folder), work.shape)),
        load_format="dummy",
        max_num_rows=engine.max_num_rows or work.max_num_rows,
        max_model_len=engine.max_model_len or work.length,
        prefix_cache=False,
    )


def _write(
    args: argparse.Namespace, summaries: dict[str, Summary], samples: Sequence[Sample], runs: dict[str, Idle]
) -> None:
    if args.json is not None:
        from gapless.bench.machine import this_machine

        found = {
            "arguments": {name: value for name, value in vars(args).items() if name not in ("handler", "api_key")},
            "machine": asdict(this_machine()),
            **{name: asdict(summary) for name, summary in summaries.items()},
            "idle": {name: asdict(run) | {"share": run.share} for name, run in runs.items()},
            "requests": [
                {"ttft_s": s.ttft_s, "tpot_s": s.tpot_s, "whole_s": s.whole_s, "error": s.error} for s in samples
            ],
        }
        Path(args.json).write_text(json.dumps(found, indent=1) + os.linesep)
    if args.plot is not None:
        from gapless.bench.serving_chart import draw

        summary = summaries["summary"]
        Path(args.plot).write_text(
            draw(samples, f"{summary.num_requests} requests, {summary.requests_per_s:.2f} a second")
        )
