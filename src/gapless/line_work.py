"""Lines of prompt files through one engine: what `gapless run` does in one process, and in each replica of a cluster.

Knows lines, dialects and an `LLM`; does not know where results are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gapless.client import Job
from gapless.core.params import SamplingParams
from gapless.errors import InvalidRequest
from gapless.formats.base import BadLine, Dialect, Line
from gapless.llm import LLM
from gapless.part_file import Record
from gapless.pipeline.engine import derive_seed

Keep = Callable[[Line | BadLine, Record, int], None]  # a line, its result, and the tokens that it took


class LineWork:
    """Some lines on their way through an engine. Several of these may share one engine, each on its own thread."""

    def __init__(self, llm: LLM, dialect: Dialect, sampling: Mapping[str, Any], running: dict[int, Line]) -> None:
        self._llm = llm
        self._dialect = dialect
        self._sampling = sampling
        self._running = running  # what the engine works on, by index

    def do(self, lines: Iterable[Line | BadLine], keep: Keep) -> None:
        """Run the lines, and give each result to `keep` as it completes."""
        for index, completion in self._llm.run(self._jobs(lines, keep)):
            line = self._running[index]
            record = self._dialect.result(line, completion, self._llm.tokenizer)
            keep(line, record, sum(len(choice.token_ids) for choice in completion.choices))
            del self._running[index]

    def _jobs(self, lines: Iterable[Line | BadLine], keep: Keep) -> Iterator[tuple[int, Job]]:
        """Jobs for the lines that can run; the others become results with their error."""
        for line in lines:
            try:
                if isinstance(line, BadLine):
                    raise InvalidRequest(line.error)
                job = prepare(self._llm, self._dialect, line, self._sampling)
            except InvalidRequest as error:
                keep(line, self._dialect.error(line, str(error)), 0)
                continue
            self._running[line.index] = line
            yield line.index, job


def prepare(llm: LLM, dialect: Dialect, line: Line, sampling: Mapping[str, Any]) -> Job:
    """A job for a line of a prompt file. Raises InvalidRequest."""
    params = SamplingParams.from_dict({**line.defaults, **sampling, **line.params})
    if params.seed is None:  # from the line, not from when it runs: an interrupted run goes on with the same draws
        params = dataclasses.replace(params, seed=derive_seed(llm.engine.options.seed, line.index))
    return dialect.job(llm, line, params)
