"""The command line: arguments in, exit codes out.

0 all done   1 some prompts failed, or results cannot be written   2 wrong usage, options or model
130 interrupted; the results so far are kept
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gapless import __version__, console
from gapless.commands import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from gapless.commands.arguments import CommandParser
from gapless.config import EngineOptions, log_level
from gapless.core.params import SamplingParams
from gapless.errors import GaplessError, OutputError
from gapless.shape_flags import add_shape_flags, shape_of_flags

SAMPLING_HELP = {
    "max_tokens": "most tokens to generate",
    "min_tokens": "ignore end-of-sequence tokens, stop tokens and stop strings before this many tokens",
    "temperature": "0 is greedy",
    "top_k": "keep the k likeliest tokens; 0 keeps all",
    "top_p": "keep the likeliest tokens that together reach this probability; 0 is greedy",
    "min_p": "keep tokens at least this likely, relative to the likeliest",
    "typical_p": "keep tokens whose information is closest to the entropy, up to this probability; 1 keeps all",
    "top_n_sigma": "keep tokens within so many standard deviations of the largest logit; 0 keeps all",
    "repetition_penalty": "divide the logits of tokens that were in the prompt or the output; 1 is none",
    "presence_penalty": "subtract from the logits of tokens that were in the output",
    "frequency_penalty": "subtract for each time that a token was in the output",
    "include_stop_str_in_output": "keep the stop string, or the stop token's text, in the text",
    "ignore_eos": "continue past the end-of-sequence token",
    "logprobs_mode": "raw_logprobs, or processed_logprobs: of the logits that tokens are drawn from",
    "n": "completions of each prompt, each with a seed of its own",
    "best_of": "generate this many, and return the n with the highest mean log-probability",
}

CHECK_OPTIONS = (
    "model",
    "device",
    "dtype",
    "load_format",
    "quantization",
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

    run = _command(commands, "run", "complete every prompt of some files", _run)
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

    generate = _command(commands, "generate", "continue a text, streamed to the terminal", _generate)
    generate.add_argument("prompt", help="the text to continue; - is standard input")
    generate.add_argument("--chat", action="store_true", help="treat the text as a user's message and answer it")
    add_engine_options(generate)
    add_sampling_options(generate)

    _add_chat(commands)
    _add_traces(commands)

    info = _command(commands, "info", "show device, data types, KV cache and limits", _info)
    add_engine_options(info, without=("trace", "record"))

    compiled = _command(commands, "compile", "compile the GPU kernels that an engine needs, into a cache", _compile)
    compiled.add_argument("--cache", metavar="DIR", help="Triton's cache (default: TRITON_CACHE_DIR, ~/.triton/cache)")
    add_engine_options(compiled, without=("device", "load_format", "trace", "record"))

    _add_check(commands)

    serve = _command(commands, "serve", "serve the model over HTTP, with the OpenAI API", _serve)
    from gapless.commands.serve import add_arguments as add_server_options

    add_server_options(serve)
    add_engine_options(serve, without=("record",))

    sim = _command(commands, "sim", "simulate replicas under a request trace, with measured step times", _sim)
    from gapless.commands.sim import add_arguments as add_sim_options

    add_sim_options(sim)
    _add_benchmarks(commands)
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
    chat = _command(commands, "chat", "talk with a model in the terminal", _chat)
    from gapless.commands.chat import add_arguments

    add_arguments(chat)
    add_engine_options(chat, without=("record",))
    own = {"max_tokens": "the rest of the context", "temperature": "0.7"}
    add_sampling_options(chat, without=("n", "best_of"), default_of=own)


def _add_check(commands: Any) -> None:
    check = _command(commands, "check", "check that asynchronous and synchronous batching give the same tokens", _check)
    check.add_argument("--prompts", metavar="FILE", help="prompts as for run; default: a few built-in ones")
    check.add_argument("--steps", type=int, default=8, help="most tokens to generate for each prompt (default: 8)")
    check.add_argument("--seeds", type=int, default=20, help="random schedules, each at depth 1, 2, 3 (default: 20)")
    check.add_argument("--json", metavar="FILE", help="write the counts to this file as JSON")
    check.add_argument("--save", metavar="FILE", default="gapless-check.json", help="file for a failing schedule")
    check.add_argument("--replay", metavar="FILE", help="replay a failing schedule, and nothing else")
    add_engine_options(check, only=CHECK_OPTIONS)


def _add_traces(commands: Any) -> None:
    trace = _command(
        commands, "trace", "run prompts and write their timeline, with the cause of every idle gap", _trace
    )
    trace.add_argument("-o", "--output", metavar="T.json", default="trace.json", help="default: trace.json, trace.html")
    compare = _command(
        commands, "compare", "run prompts at two depths and draw both timelines in the terminal", _compare
    )
    compare.add_argument("--width", type=int, metavar="N", help="characters in a line (default: the terminal's)")
    compare.add_argument("--trace", metavar="T.json", help="also write both timelines to this file, and to T.html")
    for command, depths in ((trace, ["auto"]), (compare, [1, 2])):
        command.add_argument("prompts", help="file of prompts, as for run; - is standard input")
        command.add_argument(
            "--depth", type=_number_or_text, nargs="+", default=depths, metavar="D", help="depths to run"
        )
        add_engine_options(command, without=("depth", "trace", "record"))
        add_sampling_options(command)


def _add_benchmarks(commands: Any) -> None:
    bench = commands.add_parser("bench", help="run a benchmark", description="Run a benchmark.")
    kinds = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    host = _command(kinds, "host", "measure the host cost of a step, with the model stubbed out", _bench_host)
    host.add_argument(
        "--batch", type=int, nargs="+", default=[1, 32, 128, 256, 1024], help="batch sizes (default: %(default)s)"
    )
    host.add_argument("--steps", type=int, default=200, help="steps to time at each size (default: %(default)s)")
    host.add_argument("--depth", type=int, default=2, help="steps in flight (default: %(default)s)")
    host.add_argument("--mixed", action="store_true", help="requests end and others take their rows, as in workload X")
    host.add_argument("--logprobs", type=int, metavar="N", help="score each sample, with the N likeliest tokens")
    host.add_argument("--packing", choices=("cpu", "gpu"), default="cpu", help="the device that chunks are packed for")
    host.add_argument("--json", metavar="FILE", help="write the rows to this file as JSON")
    offline = _command(kinds, "offline", "measure the throughput of a fixed job, beside peers", _bench_offline)
    from gapless.bench.offline import add_arguments

    add_arguments(offline)
    serving = _command(kinds, "serve", "put load on an OpenAI endpoint and measure its latency", _bench_serve)
    from gapless.bench.serving import add_arguments as add_load_options

    add_load_options(serving)
    add_engine_options(serving, without=("record",))
    structured = _command(kinds, "structured", "measure what structured output costs", _bench_structured)
    from gapless.bench.structured import ENGINE_FLAGS
    from gapless.bench.structured import add_arguments as add_structured_options

    add_structured_options(structured)
    add_engine_options(structured, only=ENGINE_FLAGS)
    steps = _command(kinds, "steps", "measure steps of many shapes, for gapless sim", _bench_steps)
    from gapless.bench.steps import add_arguments as add_step_options

    add_step_options(steps)
    add_engine_options(steps, without=("trace", "record"))
    checked = _command(kinds, "sim", "compare gapless sim with a real run of the same trace", _bench_sim)
    from gapless.bench.sim_check import add_arguments as add_sim_check_options

    add_sim_check_options(checked)
    add_engine_options(checked, without=("trace", "record"))


def _command(group: Any, name: str, text: str, handler: Callable[[Any], int]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = group.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(handler=handler)
    return parser


def add_engine_options(
    parser: argparse.ArgumentParser, without: Sequence[str] = (), only: Sequence[str] | None = None
) -> None:
    """A flag for each field of EngineOptions, except those that the command does not use."""
    group = parser.add_argument_group("engine")
    for field in dataclasses.fields(EngineOptions):
        if field.name in without or (only is not None and field.name not in only):
            continue
        text = field.metadata["help"] + ("" if field.default is None else f" (default: {field.default})")
        _add_flag(group, field.name, field.default, text, EngineOptions)


def add_sampling_options(
    parser: argparse.ArgumentParser, without: Sequence[str] = (), default_of: Mapping[str, str] | None = None
) -> None:
    """A flag for each field of SamplingParams; lines of a prompt file override them.

    default_of: what the command's help says of defaults that are its own.
    """
    group = parser.add_argument_group("sampling")
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    for name, text in SAMPLING_HELP.items():
        if name in without:
            continue
        default = (default_of or {}).get(name, defaults[name])
        shown = "" if default is None else f" (default: {default})"
        _add_flag(group, name, defaults[name], text + shown, SamplingParams)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be repeated")
    group.add_argument("--stop-token-id", action="append", type=int, metavar="ID", help="end at this token; repeatable")
    group.add_argument("--logit-bias", type=_json_or_text, metavar="JSON", help='add to logits: {"token id": number}')
    group.add_argument("--allowed-token-id", action="append", type=int, metavar="ID", help="no others come; repeatable")
    group.add_argument("--bad-word", action="append", metavar="TEXT", help="never complete this text; repeatable")
    group.add_argument("--bad-token-id", action="append", type=int, metavar="ID", help="a token that never comes")
    group.add_argument("--sampling-seed", type=int, metavar="N", help="same seed, same tokens")
    add_shape_flags(parser)


def _add_flag(group: Any, name: str, default: Any, text: str, owner: type) -> None:
    flag = "--" + name.replace("_", "-")
    if isinstance(default, bool):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    kinds = typing.get_args(typing.get_type_hints(owner)[name]) or (typing.get_type_hints(owner)[name],)
    kind = _number_or_text if str not in kinds or int in kinds else str
    metavar = (
        "N" if kinds[0] is int and str not in kinds else "X" if kinds[0] is float else name.rpartition("_")[2].upper()
    )
    group.add_argument(flag, type=kind, default=None, metavar=metavar, help=text)


def _json_or_text(text: str) -> Any:
    """JSON as its value, other text unchanged: the parameters check it."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _number_or_text(text: str) -> int | float | str:
    """Numbers as numbers, other text unchanged: the options check it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """Options from flags; the command itself handles several depths. Raises ConfigError."""
    values = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(EngineOptions)}
    return EngineOptions.from_dict({k: v for k, v in values.items() if v is not None and not isinstance(v, list)})


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """Sampling parameters that were set by flags."""
    values = {name: getattr(args, name, None) for name in SAMPLING_HELP}
    values |= {"stop": args.stop, "stop_token_ids": args.stop_token_id, "seed": args.sampling_seed}
    values |= {"bad_words": args.bad_word, "bad_token_ids": args.bad_token_id, "logit_bias": args.logit_bias}
    values |= {"allowed_token_ids": args.allowed_token_id}
    values |= {"structured": shape_of_flags(args)}
    found = {name: value for name, value in values.items() if value is not None}
    SamplingParams.from_dict(found)
    return found


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


def _bench_host(args: argparse.Namespace) -> int:
    from gapless.bench.host import main as bench

    return bench(args)


def _bench_offline(args: argparse.Namespace) -> int:
    from gapless.bench.offline import main as bench

    return bench(args)


def _bench_structured(args: argparse.Namespace) -> int:
    from gapless.bench.structured import main as bench

    return bench(args, engine_options(args))


def _bench_steps(args: argparse.Namespace) -> int:
    from gapless.bench.steps import main as bench

    return bench(args, engine_options(args))


def _bench_sim(args: argparse.Namespace) -> int:
    from gapless.bench.sim_check import main as bench

    return bench(args, engine_options(args))


def _bench_serve(args: argparse.Namespace) -> int:
    from gapless.bench.serving import main as bench

    return bench(args, engine_options(args))


if __name__ == "__main__":
    sys.exit(main())
