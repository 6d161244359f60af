"""The command line: arguments in, exit codes out.

0 all done   1 some prompts failed, or results cannot be written   2 wrong usage, options or model
130 interrupted; the results so far are kept
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from gapless import __version__, console
from gapless.commands import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from gapless.commands.arguments import CommandParser, add_command
from gapless.commands.bench import add_benchmarks
from gapless.commands.flags import (
    add_engine_options,
    add_sampling_options,
    engine_options,
    number_or_text,
    sampling_values,
)
from gapless.config import log_level
from gapless.core.params import SamplingParams
from gapless.errors import GaplessError, OutputError

CHECK_OPTIONS = (
    "model",
    "device",
    "dtype",
    "load_format",
    "quantization",
    "kv_dtype",
    "num_threads",
    "native",
    "batch_invariant",
    "seed",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `gapless` command."""
    console.settle()
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=log_level(), format="%(levelname)s %(name)s: %(message)s")
    console.interrupt_on_signals()
    try:
        code = int(args.handler(args))
        sys.stdout.flush()
    except GaplessError as error:
        console.say(f"gapless: {error}")
        return EXIT_FAILED if isinstance(error, OutputError) else EXIT_USAGE
    except KeyboardInterrupt:
        console.say("gapless: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone
        console.mute_stdout()
        return EXIT_FAILED
    except OSError as error:  # a full disk behind standard output, a report that cannot be saved
        console.mute_stdout()
        console.say(f"gapless: {error}")
        return EXIT_FAILED
    return code


def build_parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    parser = CommandParser(prog="gapless", description="LLM inference in which the device never waits for the host.")
    parser.add_argument("--version", action="version", version=f"gapless {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = add_command(commands, "run", "complete every prompt of some files", _run)
    run.add_argument(
        "prompts",
        nargs="+",
        metavar="FILE",
        help='files, or patterns such as "in-*.jsonl", of lines {"prompt": ...} or {"messages": [...]}, or of an '
        "OpenAI batch, or Parquet files; - is standard input",
    )
    run.add_argument(
        "-o",
        "--output",
        metavar="OUT.jsonl",
        help="write each result to OUT.jsonl.part as it completes, and the sorted file at the end; links are followed; "
        "a FIFO, a device or - (standard output) gets results as they complete; default: print them",
    )
    run.add_argument(
        "--served-model-name", action="append", metavar="NAME", help="model that bodies of an OpenAI batch may name"
    )
    run.add_argument("--token-ids", action="store_true", help="write the generated token ids too")
    run.add_argument("--restart", action="store_true", help="ignore and overwrite OUT.jsonl.part of an earlier run")
    run.add_argument(
        "--retry-errors", action="store_true", help="run again the prompts whose result in OUT.jsonl.part is an error"
    )
    run.add_argument(
        "--skip-damaged", action="store_true", help="resume from a damaged OUT.jsonl.part; damaged lines run again"
    )
    _add_cluster_options(run)
    add_engine_options(run)
    add_sampling_options(run)

    generate = add_command(commands, "generate", "continue a text, streamed to the terminal", _generate)
    generate.add_argument("prompt", help="the text to continue; - is standard input")
    generate.add_argument("--chat", action="store_true", help="treat the text as a user's message and answer it")
    add_engine_options(generate)
    add_sampling_options(generate)

    _add_chat(commands)
    _add_traces(commands)

    info = add_command(commands, "info", "show device, data types, KV cache and limits", _info)
    add_engine_options(info, without=("trace", "record"))

    compiled = add_command(commands, "compile", "compile the GPU kernels that an engine needs, into a cache", _compile)
    compiled.add_argument("--cache", metavar="DIR", help="Triton's cache (default: TRITON_CACHE_DIR, ~/.triton/cache)")
    add_engine_options(compiled, without=("device", "load_format", "trace", "record"))

    _add_check(commands)

    serve = add_command(commands, "serve", "serve the model over HTTP, with the OpenAI API", _serve)
    from gapless.commands.serve import add_arguments as add_server_options

    add_server_options(serve)
    add_engine_options(serve, without=("record",))

    sim = add_command(commands, "sim", "simulate replicas under a request trace, with measured step times", _sim)
    from gapless.commands.sim import add_arguments as add_sim_options

    add_sim_options(sim)
    add_benchmarks(commands)
    return parser


def _add_cluster_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cluster (docs/ray.md)")
    group.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="run on replicas of a Ray cluster: HOST:PORT, or local to start one here; without an address, the "
        "cluster of this machine if there is one, else local",
    )
    group.add_argument("--replicas", type=int, metavar="N", help="engines (default: all that fit; on CPUs, one a node)")
    group.add_argument(
        "--gpus-per-replica", type=float, metavar="X", help="GPUs of an engine (default: 1 where the cluster has any)"
    )


def _add_chat(commands: Any) -> None:
    chat = add_command(commands, "chat", "talk with a model in the terminal", _chat)
    from gapless.commands.chat import add_arguments

    add_arguments(chat)
    add_engine_options(chat, without=("record",))
    own = {"max_tokens": "the rest of the context", "temperature": "0.7"}
    add_sampling_options(chat, without=("n", "best_of"), default_of=own)


def _add_check(commands: Any) -> None:
    check = add_command(
        commands, "check", "check that asynchronous and synchronous batching give the same tokens", _check
    )
    check.add_argument("--prompts", metavar="FILE", help="prompts as for run; default: a few built-in ones")
    check.add_argument("--steps", type=int, default=8, help="most tokens to generate for each prompt (default: 8)")
    check.add_argument("--seeds", type=int, default=20, help="random schedules, each at depth 1, 2, 3 (default: 20)")
    check.add_argument("--json", metavar="FILE", help="write the counts to this file as JSON")
    check.add_argument("--save", metavar="FILE", default="gapless-check.json", help="file for a failing schedule")
    check.add_argument("--replay", metavar="FILE", help="replay a failing schedule, and nothing else")
    add_engine_options(check, only=CHECK_OPTIONS)


def _add_traces(commands: Any) -> None:
    trace = add_command(
        commands, "trace", "run prompts and write their timeline, with the cause of every idle gap", _trace
    )
    trace.add_argument("-o", "--output", metavar="T.json", default="trace.json", help="default: trace.json, trace.html")
    compare = add_command(
        commands, "compare", "run prompts at two depths and draw both timelines in the terminal", _compare
    )
    compare.add_argument("--width", type=int, metavar="N", help="characters in a line (default: the terminal's)")
    compare.add_argument("--trace", metavar="T.json", help="also write both timelines to this file, and to T.html")
    for command, depths in ((trace, ["auto"]), (compare, [1, 2])):
        command.add_argument("prompts", help="file of prompts, as for run; - is standard input")
        command.add_argument(
            "--depth", type=number_or_text, nargs="+", default=depths, metavar="D", help="depths to run"
        )
        add_engine_options(command, without=("depth", "trace", "record"))
        add_sampling_options(command)


def _run(args: argparse.Namespace) -> int:
    from gapless.commands.run import run

    return run(args, engine_options(args), sampling_values(args))


def _generate(args: argparse.Namespace) -> int:
    from gapless.commands.generate import generate

    return generate(args, engine_options(args), SamplingParams.from_dict(sampling_values(args)))


def _chat(args: argparse.Namespace) -> int:
    from gapless.commands.chat import chat

    return chat(args, engine_options(args), sampling_values(args))


def _trace(args: argparse.Namespace) -> int:
    from gapless.commands.trace import trace

    return trace(args, engine_options(args), sampling_values(args))


def _compare(args: argparse.Namespace) -> int:
    from gapless.commands.compare import compare

    return compare(args, engine_options(args), sampling_values(args))


def _info(args: argparse.Namespace) -> int:
    from gapless.commands.info import info

    return info(engine_options(args))


def _compile(args: argparse.Namespace) -> int:
    from gapless.commands.compile import compile_kernels

    return compile_kernels(args.cache, engine_options(args))


def _check(args: argparse.Namespace) -> int:
    from gapless.commands.check import check

    return check(args, engine_options(args))


def _serve(args: argparse.Namespace) -> int:
    from gapless.commands.serve import serve

    return serve(args, engine_options(args))


def _sim(args: argparse.Namespace) -> int:
    from gapless.commands.sim import sim

    return sim(args)


if __name__ == "__main__":
    sys.exit(main())
