"""Decode steps of the shapes of usual models on a GPU: `python -m gapless.bench.model_shapes --help`.

Kernels are tuned by a few models. This shows what the others get: the time of a step, and the share of it that reading
weights and KV cache takes at the measured read rate. Weights are random, so nothing is downloaded. A step is timed as
the difference between a long and a short run of the same prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from gapless.bench.workload_jobs import BYTES_A_NUMBER, END_TOKEN, FIRST_TOKEN
from gapless.bench.workload_rows import Rates, measure_rates
from gapless.errors import ConfigError

PROMPT_TOKENS, SHORT, LONG = 256, 16, 112
CONTEXT = PROMPT_TOKENS + (SHORT + LONG) // 2  # of a row in the steps that count, on average
_COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "hidden_act": "silu", "rope_theta": 500000.0}
_GEMMA = {
    "rope_local_base_freq": 10000.0,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}


def _shape(
    kind: str, hidden: int, layers: int, heads: tuple[int, int, int], inner: int, vocab: int, *, tied: bool, **more: Any
) -> dict[str, Any]:
    """A config.json. heads: of queries, of keys, and the size of one."""
    architectures = {"gemma3_text": "Gemma3ForCausalLM"}
    return {
        "architectures": [architectures.get(kind, f"{kind.capitalize()}ForCausalLM")],
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "intermediate_size": inner,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        **_COMMON,
        **more,
    }


MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": _shape("llama", 576, 30, (9, 3, 64), 1536, 49152, tied=True),
    "Qwen2.5-0.5B": _shape("qwen2", 896, 24, (14, 2, 64), 4864, 151936, tied=True),
    "Qwen3-0.6B": _shape("qwen3", 1024, 28, (16, 8, 128), 3072, 151936, tied=True),
    "Gemma-3-1B": _shape("gemma3_text", 1152, 26, (4, 1, 256), 6912, 262144, tied=True, **_GEMMA),
    "Llama-3.2-1B": _shape("llama", 2048, 16, (32, 8, 64), 8192, 128256, tied=True),
    "Qwen2.5-1.5B": _shape("qwen2", 1536, 28, (12, 2, 128), 8960, 151936, tied=True),
    "Qwen3-1.7B": _shape("qwen3", 2048, 28, (16, 8, 128), 6144, 151936, tied=True),
    "Llama-3.2-3B": _shape("llama", 3072, 28, (24, 8, 128), 8192, 128256, tied=True),
    "Qwen3-4B": _shape("qwen3", 2560, 36, (32, 8, 128), 9728, 151936, tied=True),
    "Qwen2.5-7B": _shape("qwen2", 3584, 28, (28, 4, 128), 18944, 152064, tied=False),
    "Mistral-7B": _shape("llama", 4096, 32, (32, 8, 128), 14336, 32768, tied=False),
    "Qwen3-8B": _shape("qwen3", 4096, 36, (32, 8, 128), 12288, 151936, tied=False),
    "Qwen3-14B": _shape("qwen3", 5120, 40, (40, 8, 128), 17408, 151936, tied=False),
}


def step_bytes(shape: dict[str, Any], num_rows: int) -> float:
    """Bytes that a step reads: all weights but an untied embedding, and the KV cache of its rows."""
    from gapless.models.registry import hf_config
    from gapless.models.shapes import weight_shapes

    config = hf_config(shape, None)
    sizes = {name: prod(size) for name, size in weight_shapes(config).items()}
    if not config.tie_embeddings:
        del sizes[f"{config.names.embedding}.weight"]
    token = sum(2 * spec.num_kv_heads * spec.head_dim for spec in config.attention_specs())
    return float(BYTES_A_NUMBER * (sum(sizes.values()) + num_rows * CONTEXT * token))


def measure(shape: dict[str, Any], rows: Sequence[int]) -> dict[int, float]:
    """Seconds of a decode step, by its number of rows."""
    from gapless import LLM

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        options: dict[str, Any] = {"load_format": "dummy", "device": "cuda", "dtype": "bfloat16", "depth": 2}
        options |= {"max_num_rows": max(rows), "max_model_len": 512, "max_batch_tokens": 1024, "prefix_cache": False}
        with LLM(folder, **options) as llm:
            _run(llm, 1, SHORT)  # the first run of a process
            return {count: (_run(llm, count, LONG) - _run(llm, count, SHORT)) / (LONG - SHORT) for count in rows}


def _run(llm: Any, num_rows: int, max_tokens: int) -> float:
    """The better of two runs, in seconds."""
    from gapless import SamplingParams

    draw = random.Random(num_rows)
    prompts = [[draw.randrange(FIRST_TOKEN, END_TOKEN) for _ in range(PROMPT_TOKENS)] for _ in range(num_rows)]
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    times: list[float] = []
    for _ in range(2):
        before = llm.stats()
        llm.generate(prompts, params)
        times.append((llm.stats() - before).time_s)
    return min(times)


def table_row(name: str, rates: Rates, rows: Sequence[int]) -> str:
    """A row in Markdown: for each number of rows the milliseconds of a step, and its share of the limit."""
    found = measure(MODELS[name], rows)
    cells = [
        f"{found[count] * 1e3:.3f} ({step_bytes(MODELS[name], count) / rates.bytes_per_s / found[count]:.0%})"
        for count in rows
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gapless.bench.model_shapes", description=__doc__.split("\n\n")[1])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"models (default: all): {', '.join(MODELS)}")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8, 32, 64], help="rows of a step (default: 1 8 32 64)"
    )
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in MODELS]:
        parser.error(f"unknown model {unknown[0]!r}; known: {', '.join(MODELS)}")
    if min(args.rows) < 1:
        parser.error("--rows: at least 1")
    from gapless.device import pick_device

    try:
        pick_device("cuda")
    except ConfigError:
        parser.error("needs an NVIDIA GPU; torch finds none here")
    rates = measure_rates()
    print(f"reads {rates.bytes_per_s / 1e12:.2f} TB/s; ms a step (share of its least time)")
    print(
        f"| model | {' | '.join(f'{count} rows' for count in args.rows)} |",
        "|---" * (len(args.rows) + 1) + "|",
        sep="\n",
    )
    for name in args.names or MODELS:
        print(table_row(name, rates, args.rows), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
