"""`gapless bench accuracy`: what quantization does to a model's answers, beside the same model without it.

Every variant reads the same passages. Perplexity says how well it predicts them. Agreement is the share of places where
its likeliest token is that of the reference, and greedy agreement the share of tokens that it generates from the
beginnings of the passages before its first difference from the reference.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gapless.bench.machine import this_machine
from gapless.config import GPU, EngineOptions
from gapless.core.params import SamplingParams
from gapless.errors import ConfigError, InvalidRequest
from gapless.progress import progress_bar

if TYPE_CHECKING:
    from gapless.llm import LLM

ENGINE_FLAGS = ("model", "device", "dtype", "load_format", "seed", "num_threads", "max_num_rows", "kv_memory")
REFERENCE = "reference"
GGUF_KINDS = ("Q8_0", "Q4_0", "Q4_1")  # that a GGUF can be rewritten to
OPTIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"quantization": "fp8"},
    "kv-fp8": {"kv_dtype": "fp8"},
    "fp8 kv-fp8": {"quantization": "fp8", "kv_dtype": "fp8"},
    "stored": {"dtype": "auto", "quantization": "auto"},
}
LONGEST = 512  # tokens of a passage; longer ones are cut
FIRST_TOKENS = 16  # of a passage, from which tokens are generated
HEAD = f"{'variant':<12} {'perplexity':>10} {'of ref.':>8} {'log-prob. off':>13} {'agreement':>9} {'greedy':>7}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `gapless bench accuracy`, besides the engine's own."""
    add = parser.add_argument
    names = ", ".join((*OPTIONS, *GGUF_KINDS))
    add("--variants", nargs="+", metavar="NAME", help=f"of {names} (default: all that the model and the device have)")
    add("--against", nargs="+", default=[], metavar="MODEL", help="further models to compare, with the same tokens")
    add("--text", metavar="FILE", help="text to predict, passages separated by empty lines (default: a built-in one)")
    add("--max-tokens", type=int, default=64, help="greedy tokens for each passage (default: %(default)s)")
    add("--json", metavar="FILE", help="write all figures to this file")


@dataclass(frozen=True, slots=True)
class QuantizedVariant:
    """A way to run the model."""

    name: str
    changes: dict[str, Any]  # of the reference's options
    kind: str | None = None  # of a GGUF that is written first


@dataclass(frozen=True, slots=True)
class TextReading:
    """What one variant made of the passages."""

    logprobs: tuple[float, ...]  # of every token of the text but the first of each passage
    likeliest: tuple[int, ...]  # at the same places
    greedy: tuple[tuple[int, ...], ...]  # for each passage
    about: str = field(default="", compare=False)  # weights and KV cache, in words

    @property
    def perplexity(self) -> float:
        return math.exp(-fmean(self.logprobs))


@dataclass(frozen=True, slots=True)
class AccuracyScore:
    """A reading beside that of the reference."""

    name: str
    about: str
    perplexity: float
    of_reference: float  # perplexity over the reference's
    logprob_error: float  # mean distance of log-probabilities
    agreement: float
    greedy_agreement: float

    @classmethod
    def of(cls, name: str, reading: TextReading, reference: TextReading) -> AccuracyScore:
        pairs = zip(reading.likeliest, reference.likeliest, strict=True)
        equal = [common_length(a, b) for a, b in zip(reading.greedy, reference.greedy, strict=True)]
        errors = [abs(a - b) for a, b in zip(reading.logprobs, reference.logprobs, strict=True)]
        return cls(
            name,
            reading.about,
            reading.perplexity,
            reading.perplexity / reference.perplexity,
            fmean(errors),
            fmean(a == b for a, b in pairs),
            sum(equal) / sum(map(len, reference.greedy)),
        )

    def __str__(self) -> str:
        figures = f"{self.perplexity:>10.3f} {self.of_reference:>8.4f} {self.logprob_error:>13.4f}"
        return f"{self.name:<12} {figures} {self.agreement:>9.1%} {self.greedy_agreement:>7.1%}  {self.about}"


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences have in common before they differ."""
    differ = (place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))


def main(args: argparse.Namespace, engine: EngineOptions) -> int:
    """Measure and show. A variant that was not asked for by name may be left out, with the reason."""
    if args.max_tokens < 1:
        raise ConfigError("--max-tokens must be at least 1")
    passages, options = read_passages(args.text), reference_options(engine)
    variants = [*chosen(args.variants, options), *(QuantizedVariant(name, {"model": name}) for name in args.against)]
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, progress_bar("reading", unit="variant") as bar:
        bench = AccuracyBench(options, passages, args.max_tokens, Path(folder))
        reference = bench.read(QuantizedVariant(REFERENCE, {}))
        scores = [AccuracyScore.of(REFERENCE, reference, reference)]
        for done, variant in enumerate(variants, 1):
            try:
                scores.append(AccuracyScore.of(variant.name, bench.read(variant), reference))
            except ConfigError as error:
                if args.variants:
                    raise
                left_out[variant.name] = str(error)
            bar.to(done, len(variants))
    print(f"{len(reference.logprobs)} tokens of {len(passages)} passages, {args.max_tokens} greedy tokens for each")
    print(HEAD, *scores, *(f"{name} is left out: {why}" for name, why in left_out.items()), sep="\n")
    if args.json:
        facts = {"model": engine.model, "num_tokens": len(reference.logprobs), "max_tokens": args.max_tokens}
        found = {"machine": asdict(this_machine()), **facts, "scores": [asdict(score) for score in scores]}
        Path(args.json).write_text(json.dumps(found | {"left_out": left_out}, indent=1) + "\n")
    return 0


def read_passages(path: str | None) -> list[str]:
    """The text's parts between empty lines. Raises ConfigError."""
    if path is None:
        text = files("gapless.bench").joinpath("assets/passages.txt").read_text(encoding="utf-8")
    else:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {path}: cannot be read: {error}") from error
    found = [passage.strip() for passage in text.split("\n\n") if passage.strip()]
    if not found:
        raise ConfigError(f"--text {path}: has no text")
    return found


def reference_options(engine: EngineOptions) -> EngineOptions:
    """The model with nothing quantized: in float32 on a CPU, in bfloat16 on a GPU, unless a dtype was given."""
    from gapless.device import pick_device

    device = pick_device(engine.device)
    dtype = ("bfloat16" if device == GPU else "float32") if engine.dtype == "auto" else engine.dtype
    return replace(engine, device=device, dtype=dtype, quantization="none", kv_dtype="auto")


def chosen(names: Sequence[str] | None, options: EngineOptions) -> list[QuantizedVariant]:
    """The variants of these names; None: all that differ from the reference for this model. Raises ConfigError."""
    from gapless.models.loader import load_config
    from gapless.models.source import resolve

    known = {name: QuantizedVariant(name, changes) for name, changes in OPTIONS.items()}
    known |= {kind: QuantizedVariant(kind, OPTIONS["stored"], kind) for kind in GGUF_KINDS}
    if names is not None:
        if wrong := [name for name in names if name not in known]:
            raise ConfigError(f"--variants: there is no {wrong[0]!r}; known: {', '.join(known)}")
        return [known[name] for name in names]
    source = resolve(options.model)
    is_gguf = source.kind == "gguf" and options.device != GPU  # there, such weights are made whole
    is_stored = is_gguf or load_config(source).fp8 is not None
    left_out: tuple[str, ...] = () if is_gguf else GGUF_KINDS
    left_out += () if is_stored else ("stored",)
    left_out += ("bfloat16",) if options.dtype == "bfloat16" else ()
    return [variant for name, variant in known.items() if name not in left_out]


class AccuracyBench:
    """Reads the passages with one variant after the other."""

    def __init__(self, options: EngineOptions, passages: Sequence[str], max_tokens: int, folder: Path) -> None:
        """options: of the reference. folder: for models that are written first."""
        self._options, self._passages, self._max_tokens, self._folder = options, passages, max_tokens, folder
        self._ids: list[list[int]] = []  # of the passages, by the reference's tokenizer
        self._vocab_size = 0

    def read(self, variant: QuantizedVariant) -> TextReading:
        """What the variant makes of the passages. The first one to read is the reference."""
        from gapless.llm import LLM

        options = replace(self._options, **variant.changes)
        if variant.kind is not None:
            options = replace(options, model=str(self._written(variant.kind)))
        with LLM(**asdict(options)) as llm:
            model = llm.engine.resolved.model
            if not self._ids:
                self._ids, self._vocab_size = self._tokenized(llm), model.vocab_size
            if model.vocab_size != self._vocab_size:
                raise InvalidRequest(f"{variant.name}: vocabulary of {model.vocab_size}, not {self._vocab_size}")
            return self._reading(llm, options.quantization)

    def _written(self, kind: str) -> Path:
        from gapless.bench.convert import write_gguf
        from gapless.models.source import resolve

        source, target = resolve(self._options.model), self._folder / f"{kind}.gguf"
        if source.kind != "gguf":
            raise ConfigError(f"--variants {kind}: {source.name} is not a GGUF file")
        write_gguf(source.path, target, kind)
        return target

    def _tokenized(self, llm: LLM) -> list[list[int]]:
        if llm.tokenizer is None:
            raise ConfigError(f"{self._options.model}: has no tokenizer, and the text must become tokens")
        room = llm.engine.resolved.limits.max_model_len - self._max_tokens
        if room <= FIRST_TOKENS:
            raise ConfigError(f"--max-tokens {self._max_tokens} leaves no room for text in a request")
        return [llm.tokenizer.encode(passage)[: min(room, LONGEST)] for passage in self._passages]

    def _reading(self, llm: LLM, quantization: str) -> TextReading:
        scored = llm.generate(self._ids, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))
        greedy = SamplingParams(max_tokens=self._max_tokens, temperature=0, ignore_eos=True)
        written = llm.generate([ids[:FIRST_TOKENS] for ids in self._ids], greedy)
        for result in (*scored, *written):
            if result.error is not None:
                raise InvalidRequest(f"a passage failed: {result.error}")
        places = [place for result in scored for place in (result.prompt_logprobs or ())[1:] if place is not None]
        resolved = llm.engine.resolved
        weights = "fp8" if quantization == "fp8" else resolved.weights
        return TextReading(
            tuple(place.logprob for place in places),
            tuple(place.top[0][0] for place in places),
            tuple(tuple(result.token_ids) for result in written),
            f"weights {weights}, KV cache {str(resolved.kv_dtype).removeprefix('torch.')}",
        )
