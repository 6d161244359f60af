"""`gapless bench`: the benchmarks by name. A benchmark is imported when it runs; its arguments are, with the parser."""

from __future__ import annotations

import argparse
from typing import Any

from gapless.commands.arguments import add_command
from gapless.commands.flags import add_engine_options, engine_options


def add_benchmarks(commands: Any) -> None:
    """The command, and a subcommand for each benchmark."""
    bench = commands.add_parser("bench", help="run a benchmark", description="Run a benchmark.")
    kinds = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    host = add_command(kinds, "host", "measure the host cost of a step, with the model stubbed out", _bench_host)
    host.add_argument(
        "--batch", type=int, nargs="+", default=[1, 32, 128, 256, 1024], help="batch sizes (default: %(default)s)"
    )
    host.add_argument("--steps", type=int, default=200, help="steps to time at each size (default: %(default)s)")
    host.add_argument("--depth", type=int, default=2, help="steps in flight (default: %(default)s)")
    host.add_argument("--mixed", action="store_true", help="requests end and others take their rows, as in workload X")
    host.add_argument("--logprobs", type=int, metavar="N", help="score each sample, with the N likeliest tokens")
    host.add_argument("--packing", choices=("cpu", "gpu"), default="cpu", help="the device that chunks are packed for")
    host.add_argument("--json", metavar="FILE", help="write the rows to this file as JSON")
    offline = add_command(kinds, "offline", "measure the throughput of a fixed job, beside peers", _bench_offline)
    from gapless.bench.offline import add_arguments

    add_arguments(offline)
    serving = add_command(kinds, "serve", "put load on an OpenAI endpoint and measure its latency", _bench_serve)
    from gapless.bench.serving import add_arguments as add_load_options

    add_load_options(serving)
    add_engine_options(serving, without=("record",))
    structured = add_command(kinds, "structured", "measure what structured output costs", _bench_structured)
    from gapless.bench.structured import ENGINE_FLAGS
    from gapless.bench.structured import add_arguments as add_structured_options

    add_structured_options(structured)
    add_engine_options(structured, only=ENGINE_FLAGS)
    accuracy = add_command(kinds, "accuracy", "measure what quantization does to a model's answers", _bench_accuracy)
    from gapless.bench.accuracy import ENGINE_FLAGS as ACCURACY_FLAGS
    from gapless.bench.accuracy import add_arguments as add_accuracy_options

    add_accuracy_options(accuracy)
    add_engine_options(accuracy, only=ACCURACY_FLAGS)
    steps = add_command(kinds, "steps", "measure steps of many shapes, for gapless sim", _bench_steps)
    from gapless.bench.steps import add_arguments as add_step_options

    add_step_options(steps)
    add_engine_options(steps, without=("trace", "record"))
    checked = add_command(kinds, "sim", "compare gapless sim with a real run of the same trace", _bench_sim)
    from gapless.bench.sim_check import add_arguments as add_sim_check_options

    add_sim_check_options(checked)
    add_engine_options(checked, without=("trace", "record"))

    routing = add_command(kinds, "routing", "compare routing policies on simulated replicas", _bench_routing)
    from gapless.bench.routing import add_arguments as add_routing_options

    add_routing_options(routing)


def _bench_host(args: argparse.Namespace) -> int:
    from gapless.bench.host import main as bench

    return bench(args)


def _bench_offline(args: argparse.Namespace) -> int:
    from gapless.bench.offline import main as bench

    return bench(args)


def _bench_structured(args: argparse.Namespace) -> int:
    from gapless.bench.structured import main as bench

    return bench(args, engine_options(args))


def _bench_accuracy(args: argparse.Namespace) -> int:
    from gapless.bench.accuracy import main as bench

    return bench(args, engine_options(args))


def _bench_steps(args: argparse.Namespace) -> int:
    from gapless.bench.steps import main as bench

    return bench(args, engine_options(args))


def _bench_sim(args: argparse.Namespace) -> int:
    from gapless.bench.sim_check import main as bench

    return bench(args, engine_options(args))


def _bench_routing(args: argparse.Namespace) -> int:
    from gapless.bench.routing import main as bench

    return bench(args)


def _bench_serve(args: argparse.Namespace) -> int:
    from gapless.bench.serving import main as bench

    return bench(args, engine_options(args))
