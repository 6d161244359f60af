"""`gapless bench structured`: what masks cost. The same job with no, some and all requests structured.

Every request generates the same number of tokens: free ones ignore the end of sequence, structured ones write a JSON
array, or a text by a regex, that is too long to end. Each structured row has a shape of its own, compiled before
(known) or not (new). The rounds of all variants take turns, and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapless.bench.machine import this_machine
from gapless.bench.workload_jobs import SHAPES
from gapless.config import EngineOptions
from gapless.core.params import SamplingParams
from gapless.core.structured import read_structured
from gapless.errors import ConfigError
from gapless.garbage import heap_frozen
from gapless.progress import progress_bar

if TYPE_CHECKING:
    from gapless.llm import LLM

ENGINE_FLAGS = (
    "model",
    "device",
    "dtype",
    "depth",
    "num_threads",
    "native",
    "max_num_rows",
    "num_blocks",
    "load_format",
)
RATE_HEAD = f"{'rows':>5} {'structured':>10} {'shapes':>8} {'tok/s':>10} {'of free':>8} {'busy':>6} {'forced':>6}"
KINDS = ("json_schema", "regex")
WORDS = ("red", "green", "blue", "yellow", "white", "black")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `gapless bench structured`, besides the engine's own."""
    add = parser.add_argument
    add("--shape", choices=tuple(SHAPES), help="random weights of this shape, instead of a model; needs --tokenizer")
    add("--tokenizer", metavar="FILE", help="tokenizer.json for --shape")
    add("--rows", type=int, nargs="+", default=[16], metavar="N", help="parallel requests (default: 16)")
    add("--kind", choices=KINDS, default=KINDS[0], help="shapes of structured rows (default: %(default)s)")
    add("--compact", action="store_true", help="JSON without white space")
    add("--max-tokens", type=int, default=128, help="new tokens of each request (default: %(default)s)")
    add("--prompt-tokens", type=int, default=32, help="tokens of each prompt (default: %(default)s)")
    add("--shares", type=int, nargs="+", default=[10, 50, 100], metavar="P", help="structured per cent (10 50 100)")
    add("--rounds", type=int, default=5, help="runs of each variant, in turn (default: %(default)s)")
    add("--temperature", type=float, default=1.0, help="of all requests (default: %(default)s)")
    add("--json", metavar="FILE", help="write all figures to this file")


@dataclass(frozen=True, slots=True)
class Mixture:
    """A share of structured requests, with shapes that are known or new."""

    rows: int
    share: int  # per cent
    is_new: bool = False

    @property
    def num_structured(self) -> int:
        return -(-self.rows * self.share // 100)


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """One run of a mixture."""

    elapsed_s: float
    busy_s: float  # of the device
    num_forced: int  # tokens without a step of their own
    num_ended_early: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens a second in the median round, and relative to free text of the same rounds."""

    rows: int
    share: int
    is_new: bool
    tokens_per_s: float
    of_free: float
    busy: float  # share of the time in which the device worked, in all rounds
    forced: float  # share of all tokens that took no step of their own
    num_ended_early: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Median and longest time to the first token, in ms, of a request on an idle engine."""

    kind: str
    median_ms: float
    longest_ms: float


def main(args: argparse.Namespace, engine: EngineOptions) -> int:
    """Measure and show; 1 when a request ended before it should."""
    if (args.shape is None) != (args.tokenizer is None):
        raise ConfigError("--shape and --tokenizer need each other")
    for name in ("max_tokens", "prompt_tokens", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    if min(args.rows) < 1:
        raise ConfigError(f"--rows must be at least 1, got {min(args.rows)}")
    if args.compact and args.kind != "json_schema":
        raise ConfigError(f"--compact is for --kind json_schema, not {args.kind}")
    if not all(1 <= share <= 100 for share in args.shares):
        raise ConfigError(f"--shares must be between 1 and 100, got {' '.join(map(str, args.shares))}")
    from gapless.llm import LLM

    with _options(args, engine) as options, LLM(**asdict(options)) as llm:
        bench, rates = StructuredBench(llm, args), list[Throughput]()
        print(RATE_HEAD)
        for rows in args.rows:
            rates += (found := bench.throughput(rows))
            print(format_rates(found), flush=True)
        waits = bench.first_tokens()
        facts = {"model": args.shape or options.model, "device": llm.engine.resolved.device_name}
        ledger = llm.engine.monitor.ledger()
    print("", format_waits(waits), sep="\n")
    if args.json:
        told = {"machine": asdict(this_machine()), **facts, "arguments": vars(args) | {"handler": None}}
        told |= {"throughput": [asdict(r) for r in rates], "first_token": [asdict(w) for w in waits], "ledger": ledger}
        Path(args.json).write_text(json.dumps(told, indent=1, default=str))
    return 1 if any(rate.num_ended_early for rate in rates) else 0


@contextmanager
def _options(args: argparse.Namespace, engine: EngineOptions) -> Iterator[EngineOptions]:
    """The engine's options; with --shape a folder with config and tokenizer is made for the run."""
    rows = max(args.rows)
    engine = replace(engine, max_num_rows=max(rows, engine.max_num_rows or 0) or None)
    if args.shape is None:
        yield engine
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[args.shape]))
        shutil.copy(args.tokenizer, Path(folder, "tokenizer.json"))
        yield replace(engine, model=folder, load_format="dummy", max_model_len=2048)


class StructuredBench:
    """One engine, and the requests that it is measured with."""

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        self._llm = llm
        self._args = args
        self._num_shapes = 0  # that were ever made

    def throughput(self, rows: int) -> list[Throughput]:
        """Rounds of every variant in turn, after one that is not counted."""
        variants = [Mixture(rows, 0)]
        variants += [Mixture(rows, share, is_new) for is_new in (False, True) for share in self._args.shares]
        known = [self._shape() for _ in range(rows)]
        played: dict[Mixture, list[RoundTimes]] = {variant: [] for variant in variants}
        with progress_bar(f"{rows} rows", len(variants) * (self._args.rounds + 1), "round") as bar:
            for number in range(self._args.rounds + 1):
                for variant in variants:
                    fresh = [self._shape() for _ in range(variant.num_structured)] if variant.is_new else known
                    found = self._round(variant, fresh)
                    if number > 0:
                        played[variant].append(found)
                    bar.advance(1, rows * self._args.max_tokens)
        free_s = statistics.median(found.elapsed_s for found in played[variants[0]])
        return [self._rate(variant, played[variant], free_s) for variant in variants]

    def _rate(self, variant: Mixture, played: Sequence[RoundTimes], free_s: float) -> Throughput:
        median_s = statistics.median(found.elapsed_s for found in played)
        return Throughput(
            variant.rows,
            variant.share,
            variant.is_new,
            tokens_per_s=variant.rows * self._args.max_tokens / median_s,
            of_free=free_s / median_s,
            busy=sum(found.busy_s for found in played) / sum(found.elapsed_s for found in played),
            forced=sum(found.num_forced for found in played) / (len(played) * variant.rows * self._args.max_tokens),
            num_ended_early=sum(found.num_ended_early for found in played),
        )

    def _round(self, variant: Mixture, given: Sequence[Any]) -> RoundTimes:
        """Structured requests are spread evenly over the rows."""
        share = variant.num_structured / variant.rows
        chosen = [int((row + 1) * share) > int(row * share) for row in range(variant.rows)]
        shapes = iter(given)
        jobs = [self._job(row, next(shapes) if is_chosen else None) for row, is_chosen in enumerate(chosen)]
        with heap_frozen():
            before = self._llm.stats()
            found = [completion for _, completion in self._llm.run(enumerate(jobs))]
            spent = self._llm.stats() - before
        for completion in found:
            if completion.error is not None:
                raise ConfigError(f"a request failed: {completion.error}")
        num_early = sum(len(completion.token_ids) < self._args.max_tokens for completion in found)
        return RoundTimes(spent.time_s, spent.busy_s, spent.num_forced, num_early)

    def first_tokens(self) -> list[FirstToken]:
        """Of free and structured requests one at a time, and of a free one that comes with a new schema."""
        known = self._shape()
        kinds: dict[str, list[float]] = {"free": [], "known schema": [], "new schema": [], "free, beside a new one": []}
        num_rounds = 4 * self._args.rounds
        with progress_bar("first tokens", num_rounds, "round") as bar:
            for _ in range(num_rounds):
                kinds["free"].append(self._first_ms(None))
                kinds["known schema"].append(self._first_ms(known))
                kinds["new schema"].append(self._first_ms(self._shape()))
                other = self._llm.engine.compile(self._params(0, self._shape()))
                kinds["free, beside a new one"].append(self._first_ms(None))
                assert other is not None
                other.result()
                bar.advance(1)
        return [FirstToken(kind, statistics.median(ms[1:]), max(ms[1:])) for kind, ms in kinds.items()]

    def _first_ms(self, shape: Any) -> float:
        begin_s = time.perf_counter()
        stream = self._llm.stream(self._prompt(0), self._params(0, shape))
        next(delta for delta in stream if delta.token_ids)
        elapsed_s = time.perf_counter() - begin_s
        stream.close()  # type: ignore[attr-defined]  # a generator
        return 1e3 * elapsed_s

    def _job(self, row: int, shape: Any) -> Any:
        return self._llm.prepare(self._prompt(row), self._params(row, shape))

    def _prompt(self, row: int) -> list[int]:
        size = self._llm.engine.resolved.model.vocab_size
        return [(7919 * (row + 1) * (place + 1)) % (size // 2) + 10 for place in range(self._args.prompt_tokens)]

    def _params(self, row: int, shape: Any) -> SamplingParams:
        common = {"max_tokens": self._args.max_tokens, "temperature": self._args.temperature, "seed": row}
        if shape is None:
            return SamplingParams(**common, ignore_eos=True)
        return SamplingParams(**common, structured=read_structured(shape))

    def _shape(self) -> Any:
        """A long array of records, or as many lines. No two shapes are the same."""
        self._num_shapes += 1
        make = self._schema if self._args.kind == "json_schema" else self._regex
        compact = {"disable_any_whitespace": True} if self._args.compact else {}
        return {self._args.kind: make(self._num_shapes), **compact}

    def _schema(self, number: int) -> Any:
        record = {
            "type": "object",
            "properties": {
                f"id_{number}": {"type": "integer", "minimum": 0, "maximum": 99999},
                "name": {"type": "string", "maxLength": 64},
                "color": {"enum": list(WORDS)},
                "score": {"type": "number"},
                "tags": {"type": "array", "items": {"enum": list(WORDS)}, "maxItems": 3},
                "active": {"type": "boolean"},
            },
            "required": [f"id_{number}", "name", "color", "score", "tags", "active"],
            "additionalProperties": False,
        }
        return {"type": "array", "items": record, "minItems": self._args.max_tokens}

    def _regex(self, number: int) -> str:
        """A line has more than four tokens in any vocabulary that is known here."""
        line = rf"\d{{1,5}}: [A-Z][a-z]{{2,20}} ({'|'.join(WORDS)}) id_{number}\n"
        return f"({line}){{{self._args.max_tokens // 4 + 1}}}"


def format_rates(rates: Sequence[Throughput]) -> str:
    """A line for each, without the head."""
    lines = []
    for rate in rates:
        kind = "" if rate.share == 0 else "new" if rate.is_new else "known"
        early = f"  {rate.num_ended_early} ended early" if rate.num_ended_early else ""
        numbers = f"{rate.tokens_per_s:>10,.1f} {rate.of_free:>8.1%} {rate.busy:>6.1%} {rate.forced:>6.1%}"
        lines.append(f"{rate.rows:>5} {rate.share:>9}% {kind:>8} {numbers}{early}")
    return "\n".join(lines)


def format_waits(waits: Sequence[FirstToken]) -> str:
    head = f"{'first token of':<24} {'median ms':>10} {'longest ms':>11}"
    return "\n".join([head, *(f"{w.kind:<24} {w.median_ms:>10.1f} {w.longest_ms:>11.1f}" for w in waits)])
