"""The job and its results: the values that travel between the benchmark and the engines it starts.

Each crosses a pipe as one line of JSON. Imports nothing heavy, so that an engine's process pays only for itself.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol

FIRST_TOKEN, END_TOKEN = 1000, 30000  # the range that prompts are drawn from, as in the anchors


SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # as the table names weights
LONG_DTYPES = {short: name for name, short in SHORT_DTYPES.items()}

# The format of the model that an engine reads: the user's own, a GGUF file as it is, a Hugging Face directory, or a
# GGUF file with its matrices converted to a plain type.
Form = Literal["given", "gguf", "directory", "gguf-BF16", "gguf-F16"]


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of the table, before it is measured."""

    name: str  # its loader; peers are chosen by it
    label: str
    module: str  # installed if it can be found
    package: str  # for pip
    weights: str  # "shipped": the GGUF file's own type
    form: Form = "given"
    mode: str = ""  # further variant: Gapless's depth, vLLM's "eager"


@dataclass(frozen=True, slots=True)
class BenchJob:
    """The work of every engine."""

    model: str  # as the user named it
    threads: int
    max_tokens: int  # new tokens of each prompt, exactly
    prompts: list[list[int]]  # all of one length

    @property
    def length(self) -> int:
        """Tokens of a finished request, prompt included."""
        return len(self.prompts[0]) + self.max_tokens

    @property
    def num_tokens(self) -> int:
        """New tokens of all prompts."""
        return len(self.prompts) * self.max_tokens


@dataclass(frozen=True, slots=True)
class ContestTask:
    """One engine's part."""

    job: BenchJob
    contender: Contender
    path: str  # the model, in the form that this engine reads
    weights: str  # data type or GGUF type
    batch: int  # most parallel requests
    trace: str = ""  # file for the timeline of Gapless's last round

    def waves(self) -> list[list[list[int]]]:
        """The prompts in groups of at most `batch`, for engines that cannot queue."""
        return [self.job.prompts[i : i + self.batch] for i in range(0, len(self.job.prompts), self.batch)]


@dataclass(frozen=True, slots=True)
class Overlap:
    """How host and device shared one round of Gapless."""

    depth: int  # at the end of the round
    num_steps: int
    num_wasted: int  # tokens computed for requests that had already ended
    device_share: float  # of the time, the compute stream was busy
    host_share: float | None  # of the time, the loop's thread had the processor; None where it cannot be told
    idle_s: dict[str, float] = field(default_factory=dict)  # of the compute stream, by cause


@dataclass(frozen=True, slots=True)
class Output:
    """An engine's output. `tokens` is None for engines that return only text."""

    num_tokens: list[int]
    tokens: list[list[int]] | None
    overlap: Overlap | None = None

    @classmethod
    def of(cls, tokens: list[list[int]], overlap: Overlap | None = None) -> Output:
        return cls([len(row) for row in tokens], tokens, overlap)


class LoadedEngine(Protocol):
    """An engine with a model in it, ready for rounds of its task."""

    @property
    def weights(self) -> str:
        """Data type of the weights, as the table names it."""

    def run(self) -> Output:
        """Generate for all prompts and wait."""


@dataclass(frozen=True, slots=True)
class Simple:
    """An engine that is one function."""

    weights: str
    run: Callable[[], Output]


@dataclass(frozen=True, slots=True)
class EngineLoaded:
    """WorkerAnswer: the model is loaded."""

    version: str
    weights: str


@dataclass(frozen=True, slots=True)
class Round:
    """WorkerAnswer: a round is done."""

    seconds: float
    peak_bytes: int
    tokens: list[list[int]] | None
    overlap: Overlap | None


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """WorkerAnswer: the engine cannot continue."""

    error: str


WorkerAnswer = EngineLoaded | Round | EngineFailure


def encode(value: ContestTask | WorkerAnswer) -> str:
    """One line."""
    return json.dumps({"kind": type(value).__name__, **asdict(value)}) + "\n"


def decode_task(line: str) -> ContestTask:
    """Raises ValueError for anything else."""
    values = json.loads(line)
    if values.pop("kind") != "ContestTask":
        raise ValueError("expected a ContestTask")
    return ContestTask(BenchJob(**values.pop("job")), Contender(**values.pop("contender")), **values)


def decode_answer(line: str) -> WorkerAnswer:
    """Raises ValueError for anything else."""
    values = json.loads(line)
    match values.pop("kind"):
        case "EngineLoaded":
            return EngineLoaded(**values)
        case "Round":
            overlap = values.pop("overlap")
            return Round(**values, overlap=Overlap(**overlap) if overlap else None)
        case "EngineFailure":
            return EngineFailure(**values)
        case kind:
            raise ValueError(f"unknown answer {kind!r}")


def random_prompts(num_prompts: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    """The same prompts each time, for any model with at least this vocabulary."""
    source = random.Random(0)
    end = min(END_TOKEN, vocab_size)
    first = FIRST_TOKEN if end > FIRST_TOKEN else 0
    return [[source.randrange(first, end) for _ in range(num_tokens)] for _ in range(num_prompts)]
