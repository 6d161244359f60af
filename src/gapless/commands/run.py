"""`gapless run`: every prompt of a file, with results that survive an interruption."""

from __future__ import annotations

import argparse
import dataclasses
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from gapless import console
from gapless.client import Job
from gapless.commands import EXIT_FAILED, EXIT_INTERRUPTED
from gapless.config import EngineOptions
from gapless.core.params import SamplingParams
from gapless.errors import ConfigError, InvalidRequest, OutputError
from gapless.garbage import heap_frozen
from gapless.llm import LLM
from gapless.part_file import Record
from gapless.pipeline.engine import derive_seed
from gapless.progress import progress_bar
from gapless.prompt_file import BadLine, Line, Prompts, read_prompts
from gapless.report import OverlapMeter
from gapless.result_file import ResultFile, Results, ResultStream, error_record, open_results, result_record
from gapless.trace.files import TraceFiles


class Printout:
    """Results without a file: kept in memory, and printed in input order at the end, whenever that is."""

    done: Set[int] = frozenset()

    def __init__(self, lines: Sequence[Line | BadLine]) -> None:
        self._lines = {line.index: line for line in lines if isinstance(line, Line)}
        self._records: dict[int, Record] = {}

    def add(self, record: Record) -> None:
        if "error" not in record:
            self._records[record["index"]] = record

    def finish(self) -> None:
        self.close()

    def close(self) -> None:
        records, self._records = self._records, {}
        for index in sorted(records):
            record, line = records[index], self._lines[index]
            asked = line.prompt if line.prompt is not None else line.messages[-1]["content"]
            print(f"[{record['id']}] {asked}")
            for choice in record.get("choices", [record]):
                print(f"{textwrap.indent(choice['text'].strip(), '    ')}  ({choice['finish_reason']})")
            print()


class RunTally:
    """Passes results on, and counts them."""

    def __init__(self, results: Results, num_done: int, num_lines: int) -> None:
        self._results = results
        self.num_done, self.num_lines = num_done, num_lines
        self.errors: list[Record] = []

    def add(self, record: Record) -> None:
        self._results.add(record)
        self.num_done += 1
        if "error" in record:
            self.errors.append(record)


def run(args: argparse.Namespace, options: EngineOptions, sampling: Mapping[str, Any]) -> int:
    """Complete the file's prompts; exit code 1 if some could not be."""
    prompts = read_prompts(args.prompts, console.stdin())
    settings = {"model": options.model, "seed": options.seed, "token_ids": args.token_ids, **sampling}
    results = _open(args, prompts, settings)
    tally = RunTally(results, len(results.done), len(prompts.lines))
    try:
        todo = [line for line in prompts.lines if line.index not in results.done]
        closing = _generate(options, todo, sampling, tally, token_ids=args.token_ids)
        results.finish()
    except (KeyboardInterrupt, OutputError) as error:
        results.close()
        return _stopped(error, results, tally, options.trace)
    finally:
        results.close()
    if options.trace:
        closing += f"\ntimeline: {TraceFiles.at(str(options.trace))}"
    return _close(results, tally, closing)


def _open(
    args: argparse.Namespace, prompts: Prompts, settings: Mapping[str, Any]
) -> Printout | ResultFile | ResultStream:
    if args.output is None:
        return Printout(prompts.lines)
    if args.prompts != "-" and os.path.isfile(args.output) and os.path.samefile(args.prompts, args.output):
        raise ConfigError(f"{args.output}: the results would overwrite the prompts; choose a different -o")
    results = open_results(
        args.output,
        prompts.fingerprint(settings),
        len(prompts.lines),
        restart=args.restart,
        skip_damaged=args.skip_damaged,
    )
    if isinstance(results, ResultStream):
        console.say(f"results go to {results.name} as they complete; such a run cannot be resumed")
    elif results.done:
        console.say(f"resuming from {results.part.path}: {len(results.done)} prompts are done (--restart starts over)")
    return results


def _generate(
    options: EngineOptions,
    todo: Sequence[Line | BadLine],
    sampling: Mapping[str, Any],
    tally: RunTally,
    *,
    token_ids: bool,
) -> str:
    """Run the prompts; the summary of how that went."""
    by_index = {line.index: line for line in todo if isinstance(line, Line)}
    with LLM(**dataclasses.asdict(options)) as llm, progress_bar("generating", tally.num_lines, "prompt") as bar:
        bar.advance(tally.num_done)
        meter = OverlapMeter(llm.engine.monitor)

        def keep(record: Record) -> None:
            tally.add(record)
            bar.advance(1, record.get("num_tokens", 0))

        with heap_frozen():
            for index, completion in llm.run(_jobs(llm, todo, sampling, keep)):
                keep(result_record(by_index[index], completion, token_ids=token_ids))
        return meter.summary()


def _jobs(
    llm: LLM, lines: Sequence[Line | BadLine], sampling: Mapping[str, Any], keep: Callable[[Record], None]
) -> Iterator[tuple[int, Job]]:
    """Jobs for the lines that can run; the others become results with their error."""
    for line in lines:
        try:
            if isinstance(line, BadLine):
                raise InvalidRequest(line.error)
            yield line.index, prepare(llm, line, sampling)
        except InvalidRequest as error:
            keep(error_record(line.index, line.id, str(error)))


def prepare(llm: LLM, line: Line, sampling: Mapping[str, Any]) -> Job:
    """A job for a line of a prompt file. Raises InvalidRequest."""
    params = SamplingParams.from_dict({**sampling, **line.params})
    if params.seed is None:  # from the line, not from when it runs: an interrupted run goes on with the same draws
        params = dataclasses.replace(params, seed=derive_seed(llm.engine.options.seed, line.index))
    if line.messages is not None:
        return llm.prepare_chat(line.messages, params)
    return llm.prepare(line.prompt, params)


def _stopped(error: BaseException, results: object, tally: RunTally, trace: str | bool | None) -> int:
    """Say why the run ended early, and what is left of it."""
    if trace:
        console.say(f"timeline so far: {TraceFiles.at(str(trace))}")
    if isinstance(error, OutputError):
        console.say(f"gapless: {error}")
    told = f"stopped after {tally.num_done} of {tally.num_lines} prompts"
    if isinstance(results, ResultFile):
        console.say(f"{told}; their results are kept in {results.part.path}. Run the same command again to resume.")
    else:
        console.say(f"{told}; with -o OUT.jsonl a run can be resumed")
    return EXIT_FAILED if isinstance(error, OutputError) else EXIT_INTERRUPTED


def _close(results: object, tally: RunTally, closing: str) -> int:
    for record in sorted(tally.errors, key=lambda record: int(record["index"])):
        console.say(f"error in {record['id']!r}: {record['error']}")
    if isinstance(results, ResultFile):
        print(
            f"{tally.num_lines - len(tally.errors)} of {tally.num_lines} prompts completed; results in {results.path}"
        )
    if isinstance(results, ResultStream):  # standard output may be the stream
        console.say(closing)
    else:
        print(closing)
    return EXIT_FAILED if tally.errors else 0
