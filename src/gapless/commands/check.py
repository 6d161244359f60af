"""`gapless check`: that asynchronous batching gives what synchronous batching gives, here and with these prompts."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path

from gapless import console
from gapless.commands import EXIT_FAILED
from gapless.config import EngineOptions
from gapless.core.params import SamplingParams
from gapless.errors import ConfigError, InvalidRequest, ModelNotFound
from gapless.formats.base import BadLine, Line
from gapless.models.source import resolve
from gapless.pipeline.engine import derive_seed
from gapless.progress import progress_bar
from gapless.prompt_file import read_lines, read_prompts
from gapless.proof import report
from gapless.proof.campaign import examine, smallest
from gapless.proof.draw import Menu, draw_asks, draw_schedule
from gapless.proof.judge import Judge
from gapless.proof.report import ProofFailure, Tally
from gapless.proof.schedule import Ask, Schedule
from gapless.proof.stage import ModelStage, Room
from gapless.proof.tiny import TINY, named_stage
from gapless.proof.vary import Variety
from gapless.text import load_tokenizer
from gapless.text.bad_words import in_tokens
from gapless.text.local_chat import LocalChat
from gapless.text.tokenizer import Tokenizer

DEPTHS = (1, 2, 3)
LONGEST_PROMPT = 512  # tokens; more would only make the check slower
NUM_ROWS = 8
STEADY_SHARE = 0.5  # of the schedules, where only the same batches can be compared
KEPT_OPTIONS = (
    *("device", "dtype", "load_format", "quantization", "kv_dtype", "num_threads", "native", "batch_invariant", "seed"),
)

RULES = "You are a helpful assistant. Answer in one sentence, in plain words, and do not repeat the question."
PROMPTS = (
    {"prompt": "The capital of France is"},
    {"prompt": "The capital of France is a city on a river, and its name is"},
    {"prompt": "def fibonacci(n):\n    ", "max_tokens": 64},
    {"prompt": f"{RULES} Write a haiku about a river."},
    {"prompt": f"{RULES} Name the three primary colours.", "temperature": 0.5, "seed": 3},
    {"prompt": "Count to ten: one, two, three,", "stop": ["ten"]},
    {"prompt": "Once upon a time, in a village by the sea,", "temperature": 0.8, "seed": 7},
    {"prompt": "Once upon a time, in a village by the sea, there", "temperature": 1.0, "top_p": 0.9, "seed": 42},
    {"prompt": "Café, naïve, 東京, 🙂:", "min_tokens": 2},
    {"prompt": "a"},
)


def check(args: argparse.Namespace, options: EngineOptions) -> int:
    """Play random schedules of the prompts and print a verdict; exit code 1 unless it is a pass."""
    if args.replay is not None:
        return _replay(ProofFailure.load(Path(args.replay)), options, model_given=args.model is not None)
    for name in ("steps", "seeds"):
        if not 1 <= getattr(args, name) <= 10**6:
            raise ConfigError(f"{name} must be between 1 and 1000000, got {getattr(args, name)}")
    for path in filter(None, (args.json, args.save)):
        _check_writable(Path(path))
    stage, asks = _set_up(options, args.prompts, args.steps)
    judge = Judge(stage, args.steps)
    variety = Variety(lambda ask: judge.alone(ask).tokens, stage.tokenizer)
    tally = Tally()
    print(f"{'model':11} {options.model} on {_about(stage)}, {len(asks)} prompts", flush=True)
    with progress_bar("checking", args.seeds * len(DEPTHS), "schedule") as bar:
        schedules = (_schedule(seed, asks, stage, variety, args.steps) for seed in range(args.seeds))
        found = examine(judge, schedules, DEPTHS, tally, lambda verdict: bar.advance(1, verdict.num_compared))
    print("\n".join(report.lines(tally, judge.comparison)))
    if args.json is not None:
        about = {"model": options.model, "on": _about(stage)}
        value = report.to_json(tally, judge.comparison, about)
        Path(args.json).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    if found is not None:
        console.say("making the failing schedule small ...")
        kept = {name: getattr(options, name) for name in KEPT_OPTIONS}
        small = smallest(judge, found, stage.room)
        _show(ProofFailure(options.model, kept, stage.room, args.steps, *small), Path(args.save))
    return 0 if tally.passed else EXIT_FAILED


def _check_writable(path: Path) -> None:
    """Before the work, not after it. Raises ConfigError."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: cannot be written: {'is a folder' if path.is_dir() else 'no such folder'}")


def _schedule(seed: int, asks: Sequence[Ask], stage: ModelStage, variety: Variety, steps: int) -> Schedule:
    menu = Menu(
        block_sizes=stage.block_sizes,
        most_requests=NUM_ROWS,
        most_tokens=steps,
        steady_share=0.0 if stage.exact else STEADY_SHARE,
    )
    return draw_schedule(random.Random(seed), asks, stage.room, menu, variety)


def _show(failure: ProofFailure, path: Path) -> None:
    failure.save(path)
    print(f"{'smallest':11} {failure.schedule.describe()}")
    print(f"{'shows':11} {failure.trouble.kind}: {failure.trouble.message}")
    print(f"{'replay':11} gapless check --replay {path}")


def _replay(failure: ProofFailure, options: EngineOptions, *, model_given: bool) -> int:
    """Play one saved schedule; the options of the file count, and the model unless another is named."""
    model = options.model if model_given else failure.model
    if model.startswith(TINY):
        stage = named_stage(model)
    else:
        stage = _load(EngineOptions.from_dict({**failure.options, "model": model}), failure.room)
    judge = Judge(stage, failure.most_tokens)
    verdict = judge.verdict(failure.schedule)
    print(f"{'schedule':11} {failure.schedule.describe()}")
    print(f"{'compared':11} {judge.comparison}")
    print(f"{'then':11} {failure.trouble.kind}: {failure.trouble.message}")
    if verdict.trouble is None:
        print(f"{'verdict':11} PASS: {verdict.num_compared} tokens compared, nothing wrong this time")
        return 0
    print(f"{'now':11} {verdict.trouble.kind}: {verdict.trouble.message}")
    print(f"{'verdict':11} FAIL")
    return EXIT_FAILED


# -- the stage and the prompts -----------------------------------------------------------------------------------


def _set_up(options: EngineOptions, prompts: str | None, steps: int) -> tuple[ModelStage, list[Ask]]:
    if options.model.startswith(TINY):
        stage = named_stage(options.model)
        return stage, draw_asks(random.Random(0), stage.config.vocab_size, 12, steps)
    stage = _load(options, None)
    asks = _asks(stage, prompts, steps, options.seed)
    longest = max(len(ask.prompt) for ask in asks) + steps
    most = min(longest, stage.config.max_position_embeddings)
    stage.make_room(Room(NUM_ROWS, NUM_ROWS * (most + 16), max(64, longest), most))
    return stage, [ask for ask in asks if len(ask.prompt) < most]


def _load(options: EngineOptions, room: Room | None) -> ModelStage:
    source = resolve(options.model)
    try:
        tokenizer: Tokenizer | None = load_tokenizer(source)
    except ModelNotFound:
        tokenizer = None
    with progress_bar("loading", unit="tensor") as bar:
        return ModelStage.load(options, source, room or Room(1, 1, 1, 1), tokenizer, bar.to)


def _asks(stage: ModelStage, prompts: str | None, steps: int, seed: int) -> list[Ask]:
    """Requests of the prompt file, or of the built-in texts, or of random tokens where there is no tokenizer."""
    if prompts is None and stage.tokenizer is None:
        return draw_asks(random.Random(seed), stage.config.vocab_size, 12, steps)
    if prompts is None:
        lines = tuple(read_lines(json.dumps({"temperature": 0, **prompt}).encode() for prompt in PROMPTS))
    else:
        lines = tuple(read_prompts([prompts], console.stdin()).lines())
    if stage.tokenizer is None:
        return [_ask(stage, None, line, steps, seed) for line in lines]
    with contextlib.closing(LocalChat(stage.tokenizer)) as chat:
        return [_ask(stage, chat, line, steps, seed) for line in lines]


def _ask(stage: ModelStage, chat: LocalChat | None, line: Line | BadLine, steps: int, seed: int) -> Ask:
    if isinstance(line, BadLine):
        raise InvalidRequest(line.error)
    params = SamplingParams.from_dict(line.params)
    params = dataclasses.replace(params, bad_words=in_tokens(params.bad_words, stage.tokenizer))
    most = min(params.max_tokens, steps)
    params = dataclasses.replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
    eos = () if params.ignore_eos else stage.config.eos_token_ids
    return Ask(
        id=str(line.id),
        prompt=tuple(_tokens(stage, chat, line)[:LONGEST_PROMPT]),
        params=params,
        seed=params.seed if params.seed is not None else derive_seed(seed, line.index),
        stop_ids=tuple(dict.fromkeys((*eos, *params.stop_token_ids))),
    )


def _tokens(stage: ModelStage, chat: LocalChat | None, line: Line) -> Sequence[int]:
    if isinstance(line.prompt, list) and line.prompt and all(type(token) is int for token in line.prompt):
        return line.prompt
    if stage.tokenizer is None or chat is None:
        raise InvalidRequest(f"prompt {line.id}: the model has no tokenizer; give token ids")
    if line.messages is not None:
        return chat.encode(line.messages, stage.config.max_position_embeddings)
    if not isinstance(line.prompt, str) or not line.prompt:
        raise InvalidRequest(f"prompt {line.id}: must be text or a list of token ids")
    return stage.tokenizer.encode(line.prompt)


def _about(stage: ModelStage) -> str:
    resolved = stage.resolved
    kv_dtype = str(resolved.kv_dtype).removeprefix("torch.")
    return f"{resolved.device_name}{', native' if resolved.native else ''}, {resolved.weights}, KV cache {kv_dtype}"
