"""`gapless generate`: one text, continued on the terminal as it comes."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from gapless.commands import EXIT_FAILED
from gapless.config import EngineOptions
from gapless.core.params import SamplingParams
from gapless.llm import LLM
from gapless.report import OverlapMeter
from gapless.trace.files import TraceFiles


def generate(args: argparse.Namespace, options: EngineOptions, params: SamplingParams) -> int:
    """Stream the continuation to standard output, the closing line to standard error."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    with LLM(**dataclasses.asdict(options)) as llm:
        meter = OverlapMeter(llm.engine)
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
            print(f"gapless: {completion.error}", file=sys.stderr)
            return EXIT_FAILED
        print(meter.summary(), file=sys.stderr)
    if options.trace:
        print(f"timeline: {TraceFiles.at(str(options.trace))}", file=sys.stderr)
    return 0
