"""`gapless bench offline`: a fixed job, by Gapless at several depths and by peers, side by side in one run.

Owns the arguments and the order of events. `contest` and `worker` drive the engines, `peers` lists them, and `table`
interprets the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gapless.errors import ConfigError, ModelError
from gapless.progress import progress_bar

if TYPE_CHECKING:
    from gapless.bench.contest import Result, TaskStart
    from gapless.bench.convert import Forms
    from gapless.bench.job import BenchJob, Contender
    from gapless.bench.machine import Machine
    from gapless.bench.table import TableRow
    from gapless.bench.workload_peers import PeerPlace
    from gapless.trace.files import TraceFiles

DEPTHS = ("auto", "1", "2")
AT_LEAST = {"num_prompts": 1, "prompt_tokens": 1, "max_tokens": 1, "rounds": 1, "warmup": 0, "threads": 1, "batch": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `gapless bench offline`."""
    add = parser.add_argument
    add("--model", default="smollm2", help="name, directory or GGUF file (default: %(default)s)")
    add("--num-prompts", type=int, default=16, help="prompts in the job (default: %(default)s)")
    add("--prompt-tokens", type=int, default=64, help="tokens of each prompt (default: %(default)s)")
    add("--max-tokens", type=int, default=64, help="new tokens of each prompt (default: %(default)s)")
    add("--batch", type=int, nargs="+", default=[16], metavar="N", help="most parallel requests (default: 16)")
    add("--depth", nargs="+", metavar="D", help="Gapless's depths (default: auto 1 2; with --workload: 1 2)")
    add("--dtype", nargs="+", default=["auto"], metavar="T", help="Gapless's data types (default: auto)")
    add("--threads", type=int, help="CPU threads of every engine (default: torch's)")
    add("--rounds", type=int, default=3, help="runs of each engine, in turn (default: %(default)s)")
    add("--warmup", type=int, default=1, help="earlier rounds that are not counted (default: %(default)s)")
    add("--peers", nargs="*", metavar="NAME", help="also run installed peers: all of them, or those named")
    add(
        "--python",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="Python interpreter with this peer, if it is in a different environment; repeatable",
    )
    _add_workloads(parser)
    add("--trace", metavar="T.json", help="write Gapless's timelines to this file, and to T.html")
    add("--json", metavar="FILE", help="write all figures to this file")
    add("--plot", metavar="FILE.svg", help="draw a bar chart to this file")
    add("--logs", metavar="FOLDER", help="keep the output of the engines in this folder (default: discard it)")


def _add_workloads(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("GPU workloads, with random weights, instead of this job").add_argument
    add("--workload", nargs="+", metavar="A..X", help="the workloads of docs/benchmarks.md, by their letters")
    add("--batch-invariant", action="store_true", help="run Gapless in its batch-invariant mode")
    add("--kernels", action="store_true", help="after each workload, list the kernels of a decode step")
    add("--peer", nargs="+", choices=("vllm", "transformers"), help="then run these peers, each in its own process")
    add(
        "--peer-python",
        metavar="PYTHON",
        help="interpreter that has the peers (default: this one); implies --peer vllm",
    )
    add("--peer-pythonpath", metavar="PATHS", help="PYTHONPATH of the peers (default: the current one)")


@dataclass(frozen=True, slots=True)
class Field:
    """The engines that take part, and those that are only mentioned."""

    contenders: tuple[Contender, ...]
    absent: tuple[Contender, ...]  # requested, but not installed
    pythons: dict[str, str]  # interpreters of peers that have their own


def main(args: argparse.Namespace) -> int:
    """Run the contest and show the results; 1 when Gapless itself failed."""
    _check(args)
    if args.workload is not None:
        return _workloads(args)
    from gapless.bench.machine import this_machine
    from gapless.bench.table import make_rows

    field = _field(args)
    machine = this_machine()
    job = _job(args)
    rows = make_rows(_measure(args, field, job), job.num_tokens)
    _show(args, job, machine, field, rows)
    return 1 if any(row.is_ours and row.error for row in rows) else 0


def _workloads(args: argparse.Namespace) -> int:
    from gapless.bench.workloads import WorkloadTask, main

    if args.peers is not None:
        raise ConfigError("--peers does not go with --workload, whose peers are named by --peer")
    return main(
        WorkloadTask(
            names=tuple(args.workload),
            depths=tuple(int(depth) if depth.isdigit() else depth for depth in args.depth or ("1", "2")),
            batch_invariant=args.batch_invariant,
            peers=_peer_places(args),
            kernels=args.kernels,
            trace=args.trace,
            json=args.json,
            plot=args.plot,
            logs=args.logs,
        )
    )


def _peer_places(args: argparse.Namespace) -> tuple[PeerPlace, ...]:
    from gapless.bench.workload_peers import PeerPlace

    python = args.peer_python or sys.executable
    if not os.access(python, os.X_OK):
        raise ConfigError(f"--peer-python: no interpreter: {python}")
    names = args.peer or (["vllm"] if args.peer_python else [])
    return tuple(PeerPlace(name, python, args.peer_pythonpath) for name in dict.fromkeys(names))


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for invalid arguments, before anything is loaded."""
    from gapless.config import EngineOptions

    for name, least in AT_LEAST.items():
        value = getattr(args, name)
        for item in value if isinstance(value, list) else [value]:
            if item is not None and item < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {item}")
    for dtype in args.dtype:
        for depth in args.depth or DEPTHS:
            EngineOptions.from_dict({"dtype": dtype, "depth": int(depth) if depth.lstrip("-").isdigit() else depth})
    for path in (args.json, args.plot):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{path}: cannot be written: no such folder")
    for name in ("kernels", "batch_invariant", "peer", "peer_python", "peer_pythonpath"):
        if getattr(args, name) and args.workload is None:
            raise ConfigError(f"--{name.replace('_', '-')} goes with --workload")
    if args.trace is not None:
        _trace_files(args)
    if args.logs is not None:
        try:
            Path(args.logs).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--logs: cannot be made: {args.logs}: {error.strerror}") from None


def _field(args: argparse.Namespace) -> Field:
    from gapless.bench.contest import is_installed
    from gapless.bench.peers import PEER_NAMES, PEERS, gapless

    for name in args.peers or ():
        if name not in PEER_NAMES:
            raise ConfigError(f"--peers: unknown peer {name!r}; known: {', '.join(PEER_NAMES)}")
    pythons = dict(_interpreter(text, PEER_NAMES) for text in args.python)
    ours = [gapless(t, d) for t in dict.fromkeys(args.dtype) for d in dict.fromkeys(args.depth or DEPTHS)]
    wanted = [] if args.peers is None else [peer for peer in PEERS if not args.peers or peer.name in args.peers]
    found = [peer for peer in wanted if is_installed(peer.module, pythons.get(peer.name, sys.executable))]
    return Field((*ours, *found), tuple(peer for peer in wanted if peer not in found), pythons)


def _interpreter(text: str, names: Sequence[str]) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in names or not os.access(path, os.X_OK):
        raise ConfigError(f"--python takes PEER=PATH of an interpreter, got {text!r}; peers: {', '.join(names)}")
    return name, path


def _job(args: argparse.Namespace) -> BenchJob:
    import torch

    from gapless.bench.job import BenchJob, random_prompts
    from gapless.models.loader import load_config
    from gapless.models.source import resolve

    source = resolve(args.model)
    config = load_config(source)
    length = args.prompt_tokens + args.max_tokens
    if length > config.max_position_embeddings:
        raise ConfigError(f"{length} tokens a request; {source.name} takes {config.max_position_embeddings} at most")
    prompts = random_prompts(args.num_prompts, args.prompt_tokens, config.vocab_size)
    return BenchJob(args.model, args.threads or torch.get_num_threads(), args.max_tokens, prompts)


def _measure(args: argparse.Namespace, field: Field, job: BenchJob) -> list[Result]:
    """A contest for each batch size."""
    from gapless.bench.contest import run_contest
    from gapless.bench.convert import Forms
    from gapless.models.source import resolve

    results = []
    batches = list(dict.fromkeys(args.batch))
    turns = 1 + args.warmup + args.rounds
    with tempfile.TemporaryDirectory(prefix="gapless-bench-") as name:
        forms = Forms(resolve(args.model), Path(name))
        logs = Path(args.logs or name)
        with progress_bar("measuring", turns * len(batches) * len(field.contenders), "turn") as bar:
            for batch in batches:
                starts, failed = _starts(field, job, batch, forms, Path(name) if args.trace else None)
                bar.advance(turns * len(failed))
                results += run_contest(starts, args.rounds, args.warmup, logs, bar.advance) + failed
        if args.trace:
            _write_trace(args, sorted(Path(name).glob("*.npz")))
    return results


def _trace_files(args: argparse.Namespace) -> TraceFiles:
    from gapless.trace.files import TraceFiles

    return TraceFiles.at(args.trace)


def _write_trace(args: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Write the timelines of all depths into one file."""
    from gapless.trace.timeline import load

    _trace_files(args).write([load(path) for path in paths])


def _starts(
    field: Field, job: BenchJob, batch: int, forms: Forms, traces: Path | None
) -> tuple[list[TaskStart], list[Result]]:
    """The contenders that can start, and those that lack their format of the model."""
    from gapless.bench.contest import Result, TaskStart
    from gapless.bench.job import ContestTask

    starts, failed = [], []
    for number, contender in enumerate(field.contenders):
        ours = traces is not None and contender.name == "gapless"
        trace = f"{traces}/{batch:06}-{number:03}.npz" if ours else ""
        weights = forms.weights(contender.weights)
        try:
            task = ContestTask(job, contender, str(forms.path(contender.form)), weights, batch, trace)
        except ModelError as error:
            failed.append(Result(contender, batch, weights, error=str(error)))
        else:
            starts.append(TaskStart(task, field.pythons.get(contender.name, sys.executable)))
    return starts, failed


def _show(args: argparse.Namespace, job: BenchJob, machine: Machine, field: Field, rows: Sequence[TableRow]) -> None:
    from gapless.bench.chart import bar_chart
    from gapless.bench.table import chart_groups, format_idle, format_overlap, format_rows

    title = f"{args.model}: {len(job.prompts)} prompts of {args.prompt_tokens} tokens, {job.max_tokens} new tokens each"
    where = f"{machine.cpu}, {job.threads} of {machine.num_cpus} threads, Gapless {machine.gapless} {machine.commit}"
    print(f"{title}, greedy; median of {args.rounds} rounds\n{where}\n")
    print(
        format_rows(rows), "", format_overlap(rows), "", format_idle(rows), "", *_notes(machine, field, rows), sep="\n"
    )
    if args.trace is not None:
        print(f"timeline of each depth's last round: {_trace_files(args)}")
    if args.json is not None:
        _write(Path(args.json), json.dumps(_values(args, job, machine, field, rows), indent=2) + "\n")
    if args.plot is not None:
        _write(Path(args.plot), bar_chart(chart_groups(rows), title, f"output tokens/s, prefill included; {where}"))


def _values(
    args: argparse.Namespace, job: BenchJob, machine: Machine, field: Field, rows: Sequence[TableRow]
) -> dict[str, object]:
    names = ("model", "num_prompts", "prompt_tokens", "max_tokens", "rounds", "warmup")
    return {
        "job": {name: getattr(args, name) for name in names} | {"threads": job.threads},
        "machine": asdict(machine),
        "rows": [asdict(row) for row in rows],
        "not_installed": [asdict(peer) for peer in field.absent],
    }


def _notes(machine: Machine, field: Field, rows: Sequence[TableRow]) -> list[str]:
    notes = [
        "tok/s: new tokens over the whole round, prefill included. load s: process start to ready. Prefix caches off.",
        "same: prompts with the tokens of Gapless's first row in the same weights; only fp32 is expected to agree.",
    ]
    notes += [f"failed: {row.engine}, {row.weights}, batch {row.batch}: {row.error}" for row in rows if row.error]
    packages = dict.fromkeys(f"{peer.label} (pip install {peer.package})" for peer in field.absent)
    notes += [f"not installed: {text}" for text in packages]
    if machine.is_busy:
        notes.append(f"the machine was busy before this run (load {machine.load:.1f}): do not trust the times")
    return notes


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
