"""The GPU workloads: their model shapes, requests and sampling, and the least work that each must do.

Most have requests of one length, all at once. M and X mix lengths, with more requests than rows. No download is needed:
a config.json describes each model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from math import prod
from typing import Any, Literal

FIRST_TOKEN, END_TOKEN = 1000, 30000
BYTES_A_NUMBER = 2  # bfloat16
EXPERT_NAME = ".experts."  # in the names of their weights


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, all submitted at once, without end of sequence."""

    shape: str
    num_requests: int
    prompt_tokens: int
    max_tokens: int
    num_rows: int = 0  # most requests that run at the same time; 0: all
    least_prompt: int = 0  # lengths vary from this to `prompt_tokens`; 0: all are alike
    least_answer: int = 0  # the same for new tokens
    unit: Literal["ms/step", "s"] = "ms/step"  # in which results are compared
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    logprobs: int | None = None  # likeliest tokens to score with each token

    @property
    def mixed(self) -> bool:
        return self.least_prompt > 0

    @property
    def is_steady(self) -> bool:
        """Whether many steps only decode, one like the next, after prompts that fit into a step each."""
        return not self.mixed and self.max_tokens >= 64 and self.prompt_tokens <= 8000

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.max_tokens

    @property
    def max_num_rows(self) -> int:
        return self.num_rows or self.num_requests

    @property
    def num_steps(self) -> int:
        """Fewest steps: a request takes a step for each new token, and the next request its row."""
        ends = [0] * self.max_num_rows
        for count in self.counts():
            heapreplace(ends, ends[0] + count)
        return max(ends)

    def prompts(self) -> list[list[int]]:
        draw = random.Random(0)
        return [self._prompt(draw) for _ in range(self.num_requests)]

    def halfway(self) -> list[list[int]]:
        """Prompts as long as prompt and answer together halfway through the run."""
        return replace(self, prompt_tokens=self.prompt_tokens + self.max_tokens // 2).prompts()

    def counts(self) -> list[int]:
        """New tokens of each request."""
        draw = random.Random(1)
        return [_length(draw, self.least_answer, self.max_tokens) for _ in range(self.num_requests)]

    def sampling(self) -> dict[str, Any]:
        """Sampling parameters of every request: the temperature, and what else is in use."""
        values = {"top_k": self.top_k, "top_p": self.top_p, "logprobs": self.logprobs}
        neutral = {"top_k": 0, "top_p": 1.0, "logprobs": None}
        in_use = {name: value for name, value in values.items() if value != neutral[name]}
        return {"temperature": self.temperature, **in_use}

    def _prompt(self, draw: random.Random) -> list[int]:
        length = _length(draw, self.least_prompt, self.prompt_tokens)
        return [draw.randrange(FIRST_TOKEN, END_TOKEN) for _ in range(length)]


def _length(draw: random.Random, least: int, most: int) -> int:
    return draw.randrange(least, most + 1) if least else most


WORKLOADS = {
    "A": Workload("8B", 32, 128, 8192),
    "B": Workload("8B", 32, 128, 1024),
    "C": Workload("8B", 1, 128, 256),
    "D": Workload("0.6B", 32, 128, 1024),
    "E": Workload("0.6B", 256, 128, 1024),
    "F": Workload("0.6B", 1, 128, 512),
    "G": Workload("8B", 8, 8000, 1, unit="s"),
    "H": Workload("8B", 16, 8000, 128, unit="s"),
    "I": Workload("0.6B", 64, 4000, 1, unit="s"),
    "L": Workload("0.6B", 32, 128, 256, logprobs=5),
    "M": Workload("0.6B", 300, 600, 300, num_rows=64, least_prompt=16, least_answer=16),
    "N1": Workload("8B", 1, 32000, 128, unit="s"),
    "N8": Workload("8B", 8, 16000, 128, unit="s"),
    "Q1": Workload("30B-A3B", 1, 128, 256),
    "Q32": Workload("30B-A3B", 32, 128, 512),
    "S": Workload("0.6B", 32, 128, 1024, temperature=1.0, top_k=50, top_p=0.95),
    "S256": Workload("0.6B", 256, 128, 1024, temperature=1.0, top_k=50, top_p=0.95),
    "X": Workload("0.6B-49k", 1024, 1024, 256, num_rows=256, least_prompt=64, least_answer=64, unit="s"),
}
_COMMON = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 32768, "hidden_act": "silu"}
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
    "30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "intermediate_size": 6144,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        **_COMMON,
        "num_key_value_heads": 4,
    },
}
SHAPES["0.6B-49k"] = {**SHAPES["0.6B"], "vocab_size": 49152}


def weight_bytes(shape: str, num_rows: int = 1) -> float:
    """Bytes of the weights that a step of so many rows reads; of an untied embedding it reads a few rows only.

    Of experts it reads those that some row chose. How many that are is expected of a router that prefers none, as one
    with random weights.
    """
    from gapless.models.registry import hf_config

    config = hf_config(SHAPES[shape], None)
    sizes = _weight_sizes(shape)
    if not config.tie_embeddings:
        del sizes[f"{config.names.embedding}.weight"]
    in_experts: int = sum(size for name, size in sizes.items() if EXPERT_NAME in name)
    read = experts_read(SHAPES[shape], num_rows) / SHAPES[shape].get("num_experts", 1)
    return float(BYTES_A_NUMBER * (sum(sizes.values()) - in_experts * (1 - read)))


def experts_read(shape: dict[str, Any], num_rows: int) -> float:
    """Experts of a layer that at least one of the rows chose, as expected; all of one where there are none."""
    count = shape.get("num_experts", 1)
    return float(count * (1 - (1 - shape.get("num_experts_per_tok", 1) / count) ** num_rows))


def decode_bytes(work: Workload, prompts: Sequence[Sequence[int]]) -> float:
    """Bytes that decode steps read: the weights in each, and before each new token the KV cache of its request.

    The first token of a request belongs to its prefill.
    """
    shape = SHAPES[work.shape]
    token_bytes = shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * shape["head_dim"] * BYTES_A_NUMBER
    pairs = zip(prompts, work.counts(), strict=True)
    num_read = sum((count - 1) * (len(prompt) + count / 2) for prompt, count in pairs)
    return float(weight_bytes(work.shape, work.max_num_rows) * (work.num_steps - 1) + token_bytes * num_read)


def prefill_operations(work: Workload, prompts: Sequence[Sequence[int]]) -> float:
    """Multiplications and additions that prompts need: products of all their tokens, and causal attention.

    The head is left out: it computes one position of each prompt.
    """
    from gapless.models.registry import hf_config

    names, shape = hf_config(SHAPES[work.shape], None).names, SHAPES[work.shape]
    ends = {f"{names.embedding}.weight", f"{names.head}.weight"}
    sizes = _weight_sizes(work.shape, num_dims=2)
    num_weights = sum(size for name, size in sizes.items() if name not in ends and EXPERT_NAME not in name)
    chosen = shape.get("num_experts_per_tok", 0) / shape.get("num_experts", 1)
    num_weights += chosen * sum(size for name, size in sizes.items() if EXPERT_NAME in name)
    num_pairs = sum(len(prompt) * (len(prompt) + 1) / 2 for prompt in prompts)
    attention = 4 * shape["num_attention_heads"] * shape["head_dim"] * shape["num_hidden_layers"] * num_pairs
    return float(2 * num_weights * sum(map(len, prompts)) + attention)


def _weight_sizes(shape: str, num_dims: int | None = None) -> dict[str, int]:
    """Numbers in each weight, or in each with so many dimensions."""
    from gapless.models.registry import hf_config
    from gapless.models.shapes import weight_shapes

    shapes = weight_shapes(hf_config(SHAPES[shape], None))
    return {name: prod(size) for name, size in shapes.items() if num_dims in (None, len(size))}
