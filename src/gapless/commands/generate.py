"""`gapless generate`: one text, continued on the terminal as it comes."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from gapless import console
from gapless.commands import EXIT_FAILED
from gapless.config import EngineOptions
from gapless.core.params import SamplingParams
from gapless.llm import LLM
from gapless.prompt_file import read_text
from gapless.report import OverlapMeter
from gapless.trace.files import TraceFiles


def generate(args: argparse.Namespace, options: EngineOptions, params: SamplingParams) -> int:
    """Stream the continuation to standard output, the closing line to standard error."""
    prompt = read_text(args.prompt, console.stdin())
    with LLM(**dataclasses.asdict(options)) as llm:
        meter = OverlapMeter(llm.engine.monitor)
        deltas = (
            llm.stream_chat([{"role": "user", "content": prompt}], params) if args.chat else llm.stream(prompt, params)
        )
        completion = None
        for delta in deltas:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            completion = delta.completion
        print()
        assert completion is not None
        if completion.error is not None:
            console.say(f"gapless: {completion.error}")
            return EXIT_FAILED
        console.say(meter.summary())
    if options.trace:
        console.say(f"timeline: {TraceFiles.at(str(options.trace))}")
    return 0
