"""`gapless generate`: one text, continued on the terminal as it comes. Several choices come when all are complete."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from gapless import console
from gapless.client import Completion
from gapless.commands import EXIT_FAILED
from gapless.config import EngineOptions
from gapless.core.choices import num_candidates
from gapless.core.params import SamplingParams
from gapless.llm import LLM
from gapless.prompt_file import read_text
from gapless.report import OverlapMeter
from gapless.trace.files import TraceFiles


def generate(args: argparse.Namespace, options: EngineOptions, params: SamplingParams) -> int:
    """Print the continuation to standard output, the closing line to standard error."""
    prompt = read_text(args.prompt, console.stdin())
    with LLM(**dataclasses.asdict(options)) as llm:
        meter = OverlapMeter(llm.engine.monitor)
        show = _print_choices if num_candidates(params) > 1 else _print_stream
        failure = show(llm, prompt, params, chat=args.chat).failure
        if failure is not None:
            console.say(f"gapless: {failure}")
            return EXIT_FAILED
        console.say(meter.summary())
    if options.trace:
        console.say(f"timeline: {TraceFiles.at(str(options.trace))}")
    return 0


def _print_stream(llm: LLM, prompt: str, params: SamplingParams, *, chat: bool) -> Completion:
    """One choice, piece by piece."""
    deltas = llm.stream_chat([{"role": "user", "content": prompt}], params) if chat else llm.stream(prompt, params)
    completion = None
    for delta in deltas:
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        completion = delta.completion
    print()
    assert completion is not None
    return completion


def _print_choices(llm: LLM, prompt: str, params: SamplingParams, *, chat: bool) -> Completion:
    """Several choices, one after the other, once all are complete."""
    job = llm.prepare_chat([{"role": "user", "content": prompt}], params) if chat else llm.prepare(prompt, params)
    ((_, completion),) = llm.run([(0, job)])
    for number, choice in enumerate(completion.choices, start=1):
        print(f"[{number}] {choice.text}")
    return completion
