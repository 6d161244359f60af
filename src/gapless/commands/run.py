"""`gapless run`: every prompt of a file, with results that survive an interruption."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gapless import batch_file
from gapless.batch_file import BadLine, Line, Record, ResultFile
from gapless.client import Job
from gapless.commands import EXIT_FAILED, EXIT_INTERRUPTED
from gapless.config import EngineOptions
from gapless.core.params import SamplingParams
from gapless.errors import InvalidRequest
from gapless.garbage import left_out
from gapless.llm import LLM
from gapless.pipeline.engine import derive_seed
from gapless.progress import Bar, progress_bar
from gapless.report import OverlapMeter
from gapless.trace.files import TraceFiles


class Results:
    """Where results go: a result file, or memory until they are printed."""

    def __init__(self, file: ResultFile | None) -> None:
        self.file = file
        self.records: dict[int, Record] = file.records if file is not None else {}

    def add(self, record: Record) -> None:
        if self.file is not None:
            self.file.add(record)
        else:
            self.records[record["index"]] = record

    @property
    def errors(self) -> list[Record]:
        return [self.records[i] for i in sorted(self.records) if "error" in self.records[i]]


def run(args: argparse.Namespace, options: EngineOptions, sampling: Mapping[str, Any]) -> int:
    """Complete the file's prompts; exit code 1 if some could not be."""
    text = batch_file.read_prompts(args.prompts, sys.stdin)
    lines = list(batch_file.read_lines(text))
    results = Results(_result_file(args, text, options, sampling))
    todo = [line for line in lines if line.index not in results.records]
    _say_resumed(results)
    try:
        with LLM(**dataclasses.asdict(options)) as llm, progress_bar("generating", len(lines), "prompt") as bar:
            bar.advance(len(lines) - len(todo))
            meter = OverlapMeter(llm.engine)
            with left_out():
                _complete(llm, todo, sampling, results, bar, token_ids=args.token_ids)
            closing = meter.summary()
    except KeyboardInterrupt:
        return _interrupted(results, lines, options.trace)
    if results.file is not None:
        results.file.finish()
    else:
        _print_completions(lines, results)
    if options.trace:
        closing += f"\ntimeline: {TraceFiles.at(str(options.trace))}"
    return _close(results, closing, len(lines))


def _result_file(
    args: argparse.Namespace, text: str, options: EngineOptions, sampling: Mapping[str, Any]
) -> ResultFile | None:
    if args.output is None:
        return None
    settings = {"model": options.model, "seed": options.seed, "token_ids": args.token_ids, **sampling}
    return ResultFile(Path(args.output), batch_file.fingerprint(text, settings), restart=args.restart)


def _complete(
    llm: LLM, lines: list[Line | BadLine], sampling: Mapping[str, Any], results: Results, bar: Bar, *, token_ids: bool
) -> None:
    by_index = {line.index: line for line in lines if isinstance(line, Line)}
    for index, completion in llm.run(_jobs(llm, lines, sampling, results, bar)):
        results.add(batch_file.result_record(by_index[index], completion, token_ids=token_ids))
        bar.advance(1, len(completion.token_ids))


def _jobs(
    llm: LLM, lines: list[Line | BadLine], sampling: Mapping[str, Any], results: Results, bar: Bar
) -> Iterator[tuple[int, Job]]:
    """Jobs for the lines that can run; the others become results with their error."""
    for line in lines:
        try:
            if isinstance(line, BadLine):
                raise InvalidRequest(line.error)
            yield line.index, prepare(llm, line, sampling)
        except InvalidRequest as error:
            results.add(batch_file.error_record(line.index, line.id, str(error)))
            bar.advance(1)


def prepare(llm: LLM, line: Line, sampling: Mapping[str, Any]) -> Job:
    """A job for a line of a prompt file. Raises InvalidRequest."""
    params = SamplingParams.from_dict({**sampling, **line.params})
    if params.seed is None:  # from the line, not from when it runs: an interrupted run goes on with the same draws
        params = dataclasses.replace(params, seed=derive_seed(llm.engine.options.seed, line.index))
    if line.messages is not None:
        return llm.prepare_chat(line.messages, params)
    return llm.prepare(line.prompt, params)


def _say_resumed(results: Results) -> None:
    if results.file is not None and results.file.num_resumed:
        print(
            f"going on with {results.file.part}: {results.file.num_resumed} prompts are done (--restart begins anew)",
            file=sys.stderr,
        )


def _interrupted(results: Results, lines: list[Line | BadLine], trace: str | bool | None) -> int:
    done, num_lines = len(results.records), len(lines)
    if trace:
        print(f"timeline so far: {TraceFiles.at(str(trace))}", file=sys.stderr)
    if results.file is None:
        _print_completions(lines, results)
        print(f"stopped after {done} of {num_lines} prompts; with -o OUT.jsonl a run can go on later", file=sys.stderr)
        return EXIT_INTERRUPTED
    results.file.close()
    print(
        f"stopped after {done} of {num_lines} prompts; they are kept in {results.file.part}. "
        "Run the same command again to go on.",
        file=sys.stderr,
    )
    return EXIT_INTERRUPTED


def _print_completions(lines: list[Line | BadLine], results: Results) -> None:
    for line in lines:
        record = results.records.get(line.index)
        if record is None or "error" in record:
            continue
        assert isinstance(line, Line)
        asked = line.prompt if line.prompt is not None else line.messages[-1]["content"]
        answer = textwrap.indent(record["text"].strip(), "    ")
        print(f"[{record['id']}] {asked}\n{answer}  ({record['finish_reason']})\n")


def _close(results: Results, closing: str, num_lines: int) -> int:
    errors = results.errors
    for record in errors:
        print(f"error in {record['id']!r}: {record['error']}", file=sys.stderr)
    if results.file is not None:
        print(f"{num_lines - len(errors)} of {num_lines} prompts completed; results in {results.file.path}")
    print(closing)
    return EXIT_FAILED if errors else 0
