"""The GPU workloads A to F: two model shapes with random weights, from one request to 256, timed end to end.

A limit stands beside each time: the bytes that a step must read (weights once, the KV cache of every live token) over
the read rate measured in the same run. No download is needed: a config.json is all there is of the models.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapless.errors import ConfigError
from gapless.progress import progress_bar

if TYPE_CHECKING:
    from gapless.trace.timeline import Timeline

FIRST_TOKEN, END_TOKEN = 1000, 30000
BYTES_A_NUMBER = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one length, all at once, greedy, with no end of sequence."""

    shape: str
    num_requests: int
    prompt_tokens: int
    max_tokens: int

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.max_tokens

    def prompts(self, seed: int = 0) -> list[list[int]]:
        draw = random.Random(seed)
        return [self._prompt(draw) for _ in range(self.num_requests)]

    def _prompt(self, draw: random.Random) -> list[int]:
        return [draw.randrange(FIRST_TOKEN, END_TOKEN) for _ in range(self.prompt_tokens)]


WORKLOADS = {
    "A": Workload("8B", 32, 128, 8192),
    "B": Workload("8B", 32, 128, 1024),
    "C": Workload("8B", 1, 128, 256),
    "D": Workload("0.6B", 32, 128, 1024),
    "E": Workload("0.6B", 256, 128, 1024),
    "F": Workload("0.6B", 1, 128, 512),
}
_COMMON = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 16384, "hidden_act": "silu"}
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        **_COMMON,
    },
    "0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        **_COMMON,
    },
}


@dataclass(frozen=True, slots=True)
class Row:
    """One workload at one depth."""

    workload: str
    depth: int
    seconds: float
    ms_per_step: float
    tokens_per_s: float
    limit_ms: float  # mean over the run
    limit_share: float
    idle_share: float  # of the compute stream, in the run
    host_ms_per_step: float  # processor time of the loop
    start_s: float
    peak_gib: float
    idle_by_cause: dict[str, float]  # seconds of the compute stream


def weight_bytes(shape: str) -> int:
    """Bytes of the weights that a step reads whole; of an untied embedding it reads a few rows only."""
    from gapless.models.config import ModelConfig
    from gapless.models.llama import weight_shapes

    config = ModelConfig.from_hf(SHAPES[shape], None)
    sizes = {name: prod(size) for name, size in weight_shapes(config).items()}
    if not config.tie_embeddings:
        del sizes["model.embed_tokens.weight"]
    return BYTES_A_NUMBER * sum(sizes.values())


def mean_step_bytes(work: Workload) -> float:
    """Bytes that a decode step reads, on the average over the run."""
    shape = SHAPES[work.shape]
    token_bytes = shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * shape["head_dim"] * BYTES_A_NUMBER
    mean_length = work.prompt_tokens + work.max_tokens / 2
    return float(weight_bytes(work.shape) + work.num_requests * mean_length * token_bytes)


def measure(
    names: Sequence[str], depths: Sequence[int], folder: Path, timelines: list[Timeline] | None = None
) -> Iterator[Row]:
    """Run the workloads at each depth, one engine for all that share a shape; add each run's timeline to a list."""
    from gapless.device.cuda import CudaDevice

    rate = CudaDevice().read_rate()
    for shape in dict.fromkeys(WORKLOADS[name].shape for name in names):
        path = folder / shape
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(SHAPES[shape]))
        chosen = [name for name in names if WORKLOADS[name].shape == shape]
        for depth in depths:
            yield from _measure_shape(path, chosen, depth, rate, timelines)


def _measure_shape(
    path: Path, names: Sequence[str], depth: int, rate: float, timelines: list[Timeline] | None
) -> Iterator[Row]:
    from gapless import LLM

    works = [WORKLOADS[name] for name in names]
    began = time.perf_counter()
    llm = LLM(
        path,
        load_format="dummy",
        device="cuda",
        dtype="bfloat16",
        depth=depth,
        max_num_rows=max(work.num_requests for work in works),
        max_model_len=max(work.length for work in works),
        prefix_cache=False,
        trace=timelines is not None,
    )
    start_s = time.perf_counter() - began
    with llm:
        for name in names:
            yield _time(llm, name, depth, rate, start_s, timelines)


def _time(llm: Any, name: str, depth: int, rate: float, start_s: float, timelines: list[Timeline] | None) -> Row:
    from gapless import SamplingParams
    from gapless.bench.torch_engines import loop_cpu_s

    work = WORKLOADS[name]
    llm.generate(work.prompts(seed=1), SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))  # warm up
    before, host_s, idle = llm.stats(), loop_cpu_s(), llm.engine.idle_by_cause()
    found = llm.generate(work.prompts(), SamplingParams(max_tokens=work.max_tokens, temperature=0, ignore_eos=True))
    spent, host_s = llm.stats() - before, loop_cpu_s() - host_s
    if timelines is not None:
        timelines.append(llm.engine.timeline(f"{name}, depth {depth}", before).trimmed())
    wrong = [item for item in found if len(item.token_ids) != work.max_tokens]
    if wrong:
        raise RuntimeError(f"workload {name}: {len(wrong)} requests did not finish: {wrong[0].error}")
    limit_ms = mean_step_bytes(work) / rate * 1e3
    step_ms = spent.time_s / work.max_tokens * 1e3
    return Row(
        workload=name,
        depth=depth,
        seconds=spent.time_s,
        ms_per_step=step_ms,
        tokens_per_s=spent.num_generated / spent.time_s,
        limit_ms=limit_ms,
        limit_share=limit_ms / step_ms,
        idle_share=1 - spent.busy_s / spent.time_s,
        host_ms_per_step=host_s / spent.num_steps * 1e3,
        start_s=start_s,
        peak_gib=llm.engine.device_memory() / 2**30,
        idle_by_cause={cause: s - idle[cause] for cause, s in llm.engine.idle_by_cause().items() if s > idle[cause]},
    )


def main(names: Sequence[str], depths: Sequence[int], json_path: str | None, trace: str | None = None) -> int:
    """Measure, print a table, and write it as JSON, and the timelines, if asked."""
    from gapless.device import pick_device
    from gapless.trace.files import TraceFiles

    pick_device("cuda")
    for name in names:
        if name not in WORKLOADS:
            raise ConfigError(f"--workload: unknown {name!r}; known: {', '.join(WORKLOADS)}")
    files = TraceFiles.at(trace) if trace is not None else None
    timelines: list[Timeline] | None = [] if files is not None else None
    rows = []
    print(HEADER)
    with tempfile.TemporaryDirectory() as folder, progress_bar("measuring", len(names) * len(depths), "run") as bar:
        for row in measure(names, depths, Path(folder), timelines):
            rows.append(row)
            bar.write(_line(row), sys.stdout)
            bar.advance(1)
    if files is not None and timelines:
        files.write(timelines)
        print(f"timeline: {files}")
    if json_path is not None:
        Path(json_path).write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    return 0


HEADER = "workload depth        s  ms/step    tok/s   limit of limit   idle  host ms start s    GiB"


def _line(row: Row) -> str:
    from gapless.report import idle_line

    return (
        f"{row.workload:>8} {row.depth:>5} {row.seconds:>8.2f} {row.ms_per_step:>8.3f} {row.tokens_per_s:>8.0f} "
        f"{row.limit_ms:>7.3f} {row.limit_share:>8.1%} {row.idle_share:>6.1%} {row.host_ms_per_step:>8.3f} "
        f"{row.start_s:>7.1f} {row.peak_gib:>6.1f}\n{'':>15}{idle_line(row.idle_by_cause, row.seconds)}"
    )
