"""`gapless trace`: runs the prompts of a file at one depth or several, and writes their timeline."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gapless import console
from gapless.commands import EXIT_FAILED, EXIT_INTERRUPTED
from gapless.config import EngineOptions
from gapless.core.params import SamplingParams
from gapless.errors import InvalidRequest
from gapless.formats.base import Line
from gapless.formats.plain import PlainRows
from gapless.garbage import heap_frozen
from gapless.line_work import prepare
from gapless.llm import LLM
from gapless.progress import progress_bar
from gapless.prompt_file import read_prompts
from gapless.report import OverlapMeter
from gapless.trace.files import TraceFiles
from gapless.trace.timeline import Timeline

WARM_UP = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """A run of all prompts at one depth."""

    timeline: Timeline
    tokens: dict[int, tuple[int, ...]]  # by line
    errors: dict[int, str]
    summary: str
    is_whole: bool  # False: interrupted


def trace(args: argparse.Namespace, options: EngineOptions, sampling: Mapping[str, Any]) -> int:
    """Record, write both files, and print what they say in short."""
    files = TraceFiles.at(args.output)
    runs = record_all(args.prompts, options, sampling, args.depth)
    files.write([run.timeline for run in runs])
    for run in runs:
        print(run.summary)
    print(f"timeline: {files}")
    code = tell_errors(runs)
    if runs[-1].is_whole:
        return code
    console.say(f"interrupted at {runs[-1].timeline.label}: the timeline ends there")
    return EXIT_INTERRUPTED


def record_all(
    path: str, options: EngineOptions, sampling: Mapping[str, Any], depths: Sequence[int | str]
) -> list[Recorded]:
    """Run the prompts of a file at each depth, up to an interrupt. Raises InvalidRequest if any line cannot run."""
    found = list(read_prompts([path], console.stdin()).lines())
    for line in found:
        if not isinstance(line, Line):
            raise InvalidRequest(line.error)
    lines = [line for line in found if isinstance(line, Line)]
    wanted = [
        EngineOptions(**{**dataclasses.asdict(options), "depth": depth, "trace": True})
        for depth in dict.fromkeys(depths)
    ]
    runs: list[Recorded] = []
    for each in wanted:
        runs.append(_record(each, lines, sampling))
        if not runs[-1].is_whole:
            break
    return runs


def _record(options: EngineOptions, lines: Sequence[Line], sampling: Mapping[str, Any]) -> Recorded:
    with LLM(**dataclasses.asdict(options)) as llm, progress_bar("generating", len(lines), "prompt") as bar:
        jobs = [(line.index, prepare(llm, PlainRows(), line, sampling)) for line in lines]
        llm.generate([0], WARM_UP)  # what only a first step pays is not traced
        meter = OverlapMeter(llm.engine.monitor)
        tokens, errors, is_whole = {}, {}, False
        with contextlib.suppress(KeyboardInterrupt), heap_frozen():
            for index, completion in llm.run(jobs):
                tokens[index] = tuple(token for choice in completion.choices for token in choice.token_ids)
                if completion.failure is not None:
                    errors[index] = completion.failure
                bar.advance(1, len(tokens[index]))
            is_whole = True
        timeline = llm.engine.monitor.timeline(before=meter.before).trimmed()
        return Recorded(timeline, tokens, errors, meter.summary(), is_whole)


def tell_errors(runs: Sequence[Recorded]) -> int:
    """Print the prompts that failed; the exit code that this means."""
    for run in runs:
        for index, error in run.errors.items():
            console.say(f"error in line {index}, {run.timeline.label}: {error}")
    return EXIT_FAILED if any(run.errors for run in runs) else 0
