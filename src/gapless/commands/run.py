"""`gapless run`: every prompt of some files, with results that survive an interruption.

Holds only the prompts that the engine works on: a run may have millions.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import textwrap
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gapless import console
from gapless.commands import EXIT_FAILED, EXIT_INTERRUPTED
from gapless.config import EngineOptions
from gapless.distributed.cluster import Wishes
from gapless.errors import ConfigError, OutputError
from gapless.formats.base import BadLine, Dialect, Line, OutputForm
from gapless.formats.find import find_dialect, output_container
from gapless.formats.plain import PlainRows
from gapless.garbage import heap_frozen
from gapless.line_work import Keep, LineWork
from gapless.llm import LLM
from gapless.part_file import Record, failed
from gapless.progress import progress_bar
from gapless.prompt_file import Prompts, read_prompts
from gapless.report import OverlapMeter
from gapless.result_file import ResultFile, Results, ResultStream, errors_beside, open_results
from gapless.run_identity import RunIdentity, digest_of_model
from gapless.trace.files import TraceFiles

MOST_ERRORS = 20  # told at the end; all of them are in the results


class Printout:
    """Results without a file: kept in memory, and printed in input order at the end, whenever that is."""

    done: Set[int] = frozenset()

    def __init__(self, running: Mapping[int, Line]) -> None:
        self.num_failed = 0
        self._running = running
        self._texts: dict[int, str] = {}

    def add(self, record: Record) -> None:
        if failed(record):
            self.num_failed += 1
            return
        line = self._running[record["index"]]
        asked = line.prompt if line.prompt is not None else line.messages[-1]["content"]
        told = [f"[{record['id']}] {asked}"]
        for choice in record.get("choices", [record]):
            told.append(f"{textwrap.indent(choice['text'].strip(), '    ')}  ({choice['finish_reason']})")
        self._texts[line.index] = "\n".join(told)

    def finish(self) -> None:
        self.close()

    def close(self) -> None:
        texts, self._texts = self._texts, {}
        for index in sorted(texts):
            print(texts[index], end="\n\n")


class RunTally:
    """Passes results on, and counts them."""

    def __init__(self, results: Results, num_lines: int) -> None:
        self._results = results
        self.num_done, self.num_lines = len(results.done), num_lines
        self.errors: list[str] = []  # the first ones, in words

    @property
    def num_errors(self) -> int:
        """Those of an earlier run that stay included."""
        return self._results.num_failed

    def add(self, record: Record, name: str | int) -> None:
        self._results.add(record)
        self.num_done += 1
        if failed(record) and len(self.errors) < MOST_ERRORS:
            self.errors.append(f"error in {name!r}: {_words(record['error'])}")


def _words(error: Any) -> str:
    return str(error["message"] if isinstance(error, dict) else error)


def run(args: argparse.Namespace, options: EngineOptions, sampling: Mapping[str, Any]) -> int:
    """Complete the prompts of the files; exit code 1 if some could not be."""
    wishes = cluster_wishes(args, options)
    prompts = read_prompts(args.prompts, console.stdin())
    running: dict[int, Line] = {}  # what the engine works on, by index
    settings = {"model": options.model, "seed": options.seed, "token_ids": args.token_ids, **sampling}
    if args.served_model_name:  # decides which rows of a batch can run
        settings["served_model_name"] = args.served_model_name
    contents = {"input": prompts.digest, "model_files": digest_of_model(options.model)}
    identity = RunIdentity({**settings, **contents})
    names = args.served_model_name or [options.model, Path(options.model).name]
    dialect = find_dialect(prompts.first(), token_ids=args.token_ids, names=names, run=identity.fingerprint)
    results = _open(args, prompts, dialect, identity, running)
    tally = RunTally(results, prompts.num_lines)
    try:
        todo = (line for line in prompts.lines(dialect) if line.index not in results.done)
        closing = ""
        if tally.num_done < tally.num_lines:
            work = Work(options, dialect, sampling, tally, running)
            closing = work.do(todo) if wishes is None else work.do_on_cluster(todo, wishes)
        results.finish()
    except (KeyboardInterrupt, OutputError) as error:
        results.close()
        return _stopped(error, results, tally, options.trace)
    finally:
        results.close()
    if options.trace and closing:
        closing += f"\ntimeline: {TraceFiles.at(str(options.trace))}"
    return _close(results, tally, closing)


def _open(
    args: argparse.Namespace, prompts: Prompts, dialect: Dialect, identity: RunIdentity, running: Mapping[int, Line]
) -> Printout | ResultFile | ResultStream:
    if args.output is None:
        if not isinstance(dialect, PlainRows):
            raise ConfigError("the results of a batch go to a file; add -o OUT.jsonl")
        return Printout(running)
    _check_overwrite(args.output, prompts)
    results = open_results(
        args.output,
        identity,
        prompts.num_lines,
        form=OutputForm(output_container(args.output), dialect.columns, dialect.has_index),
        restart=args.restart,
        skip_damaged=args.skip_damaged,
        retry_errors=args.retry_errors,
    )
    if isinstance(results, ResultStream):
        console.say(f"results go to {results.name} as they complete; such a run cannot be resumed")
    elif results.done:
        console.say(f"resuming from {results.part.path}: {len(results.done)} prompts are done (--restart starts over)")
    elif args.retry_errors and not results.num_failed:
        results.close()
        raise ConfigError(f"{args.output}: no errors to retry: there is no {results.part.path}; run without the flag")
    return results


def _check_overwrite(output: str, prompts: Prompts) -> None:
    taken = [output, str(errors_beside(Path(os.path.realpath(output))))]
    for place in filter(os.path.isfile, taken):
        for file in prompts.files:
            if os.path.isfile(file.name) and os.path.samefile(file.name, place):
                raise ConfigError(f"{place}: the results would overwrite the prompts; choose a different -o")


class Work:
    """The prompts on their way through an engine, or through those of a cluster."""

    def __init__(
        self,
        options: EngineOptions,
        dialect: Dialect,
        sampling: Mapping[str, Any],
        tally: RunTally,
        running: dict[int, Line],
    ) -> None:
        self._options = options
        self._dialect = dialect
        self._sampling = sampling
        self._tally = tally
        self._running = running

    def do(self, todo: Iterator[Line | BadLine]) -> str:
        """Run them here; the summary of how that went."""
        with LLM(**dataclasses.asdict(self._options)) as llm, self._progress() as keep, heap_frozen():
            meter = OverlapMeter(llm.engine.monitor)
            LineWork(llm, self._dialect, self._sampling, self._running).do(todo, keep)
            return meter.summary()

    def do_on_cluster(self, todo: Iterator[Line | BadLine], wishes: Wishes) -> str:
        """Run them on replicas; the summary of how that went. Raises ConfigError."""
        from gapless.distributed.cluster import connected, place
        from gapless.distributed.pieces import Crew

        options = dataclasses.asdict(self._options)
        if os.path.exists(self._options.model):  # replicas run in other folders
            options["model"] = os.path.abspath(self._options.model)
        began = time.monotonic()
        with connected(wishes.address):
            console.interrupt_on_signals()  # Ray has handlers of its own
            placement = place(wishes)
            crew = Crew(placement, options, self._dialect, self._sampling)
            with self._progress() as keep:
                crew.do(todo, self._tally.num_lines - self._tally.num_done, self._told(keep))
        lost = f", {crew.num_lost} lost and replaced" if crew.num_lost else ""
        replicas = "replica" if placement.num_replicas == 1 else "replicas"
        return f"{placement.num_replicas} {replicas} on Ray{lost}, {time.monotonic() - began:.1f} s"

    def _told(self, keep: Keep) -> Keep:
        """Results that are printed look their line up."""

        def keep_line(line: Line | BadLine, record: Record, num_tokens: int) -> None:
            if isinstance(line, Line):
                self._running[line.index] = line
            keep(line, record, num_tokens)
            self._running.pop(line.index, None)

        return keep_line

    @contextmanager
    def _progress(self) -> Iterator[Keep]:
        tally = self._tally
        with progress_bar("generating", tally.num_lines, "prompt") as bar:
            bar.advance(tally.num_done)

            def keep(line: Line | BadLine, record: Record, num_tokens: int) -> None:
                tally.add(record, line.id)
                bar.advance(1, num_tokens)

            yield keep


def cluster_wishes(args: argparse.Namespace, options: EngineOptions) -> Wishes | None:
    """What the flags ask of a cluster; None without --ray. Raises ConfigError."""
    given = {"--replicas": args.replicas, "--gpus-per-replica": args.gpus_per_replica}
    if args.ray is None:
        if named := [flag for flag, value in given.items() if value is not None]:
            raise ConfigError(f"{named[0]} needs --ray")
        return None
    if options.ranks_on_ray is not None:
        raise ConfigError("--ranks-on-ray is for one engine; the ranks of a replica are on its node, without this flag")
    if options.trace:
        raise ConfigError("--trace is for one engine; leave it out, or leave --ray out")
    if args.replicas is not None and args.replicas < 1:
        raise ConfigError(f"--replicas must be at least 1, got {args.replicas}")
    if args.gpus_per_replica is not None and not 0 <= args.gpus_per_replica < math.inf:
        raise ConfigError(f"--gpus-per-replica must be 0 or more, got {args.gpus_per_replica}")
    return Wishes(args.ray, args.replicas, args.gpus_per_replica, options.tensor_parallel)


def _stopped(error: BaseException, results: object, tally: RunTally, trace: str | bool | None) -> int:
    """Say why the run ended early, and what is left of it."""
    if trace:
        console.say(f"timeline so far: {TraceFiles.at(str(trace))}")
    if isinstance(error, OutputError):
        console.say(f"gapless: {error}")
    told = f"stopped after {tally.num_done} of {tally.num_lines} prompts"
    if isinstance(results, ResultFile) and not tally.num_done:
        console.say(f"{told}; nothing is written yet. Run the same command again.")
    elif isinstance(results, ResultFile):
        console.say(f"{told}; their results are kept in {results.part.path}. Run the same command again to resume.")
    else:
        console.say(f"{told}; with -o OUT.jsonl a run can be resumed")
    return EXIT_FAILED if isinstance(error, OutputError) else EXIT_INTERRUPTED


def _close(results: object, tally: RunTally, closing: str) -> int:
    for told in tally.errors:
        console.say(told)
    if tally.num_errors > len(tally.errors):
        console.say(f"{tally.num_errors} prompts failed")
    if isinstance(results, ResultFile):
        num_done = tally.num_lines - tally.num_errors
        print(f"{num_done} of {tally.num_lines} prompts completed; results in {results.path}")
        if tally.num_errors:
            console.say(f"errors are in {results.errors_path} too; --retry-errors runs those prompts again")
    if isinstance(results, ResultStream):  # standard output may be the stream
        console.say(closing)
    elif closing:
        print(closing)
    return EXIT_FAILED if tally.num_errors else 0
