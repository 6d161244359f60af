"""The GPU workloads A to F and M: two model shapes, from one request to 300, and the bytes that they must read.

A to F have requests of one length, all at once. M mixes lengths, with more requests than rows. No download is needed: a
config.json describes each model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

FIRST_TOKEN, END_TOKEN = 1000, 30000
BYTES_A_NUMBER = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, all submitted at once, greedy, without end of sequence."""

    shape: str
    num_requests: int
    prompt_tokens: int
    max_tokens: int
    num_rows: int = 0  # most requests that run at the same time; 0: all
    mixed: bool = False  # prompts and outputs of any length up to these

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.max_tokens

    @property
    def max_num_rows(self) -> int:
        return self.num_rows or self.num_requests

    def prompts(self, seed: int = 0) -> list[list[int]]:
        draw = random.Random(seed)
        return [self._prompt(draw) for _ in range(self.num_requests)]

    def halfway(self) -> list[list[int]]:
        """Prompts as long as prompt and answer together halfway through the run."""
        return replace(self, prompt_tokens=self.prompt_tokens + self.max_tokens // 2).prompts()

    def counts(self) -> list[int]:
        """New tokens of each request."""
        draw = random.Random(1)
        return [self._length(draw, self.max_tokens) for _ in range(self.num_requests)]

    def _prompt(self, draw: random.Random) -> list[int]:
        return [draw.randrange(FIRST_TOKEN, END_TOKEN) for _ in range(self._length(draw, self.prompt_tokens))]

    def _length(self, draw: random.Random, most: int) -> int:
        return draw.randrange(16, most + 1) if self.mixed else most


WORKLOADS = {
    "A": Workload("8B", 32, 128, 8192),
    "B": Workload("8B", 32, 128, 1024),
    "C": Workload("8B", 1, 128, 256),
    "D": Workload("0.6B", 32, 128, 1024),
    "E": Workload("0.6B", 256, 128, 1024),
    "F": Workload("0.6B", 1, 128, 512),
    "M": Workload("0.6B", 300, 600, 300, num_rows=64, mixed=True),
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


def weight_bytes(shape: str) -> int:
    """Bytes of the weights that a step reads whole; of an untied embedding it reads a few rows only."""
    from gapless.models.registry import hf_config
    from gapless.models.shapes import weight_shapes

    config = hf_config(SHAPES[shape], None)
    sizes = {name: prod(size) for name, size in weight_shapes(config).items()}
    if not config.tie_embeddings:
        del sizes[f"{config.names.embedding}.weight"]
    return BYTES_A_NUMBER * sum(sizes.values())


def run_bytes(work: Workload, prompts: Sequence[Sequence[int]], num_steps: int) -> float:
    """Bytes that a run reads: the weights in each step, and before each new token the KV cache of its request."""
    shape = SHAPES[work.shape]
    token_bytes = shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * shape["head_dim"] * BYTES_A_NUMBER
    pairs = zip(prompts, work.counts(), strict=True)
    num_read = sum(count * (len(prompt) + count / 2) for prompt, count in pairs)
    return float(weight_bytes(work.shape) * num_steps + token_bytes * num_read)
