"""Tiny random models of every family, by transformers: configs with odd values, and what their tokens must be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import oracles

LENGTHS = (40, 3, 17)  # of prompts: some longer than a chunk, and than a window
NUM_STEPS = 64
MAX_LENGTH = max(LENGTHS) + NUM_STEPS
CLOSE = 1e-4


def raw_config(**changes: Any) -> dict[str, Any]:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 80,
        "max_position_embeddings": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    return {key: value for key, value in (raw | changes).items() if value is not ...}


def save_hf(directory: Path, *, max_shard_size: str = "1GB", spread: float = 0.2, **changes: Any) -> Any:
    """Saves a random transformers model of this config (`...` drops a key) and returns it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = {"pad_token_id": 0} | raw_config(**changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0, spread)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def random_tokens(vocab_size: int = 97, count: int = 60) -> torch.Tensor:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(1))


def of(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type} | changes


GRANITE = of(
    "GraniteForCausalLM",
    "granite",
    embedding_multiplier=3.0,
    residual_multiplier=0.4,
    attention_multiplier=0.3,
    logits_scaling=1.5,
)
SMOLLM3 = of("SmolLM3ForCausalLM", "smollm3", num_hidden_layers=3)
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.3], "long_factor": [2.0, 5.0], "rope_theta": 1e4}
PHI3 = of("Phi3ForCausalLM", "phi3", head_dim=..., sliding_window=None)
PYTHIA = of("GPTNeoXForCausalLM", "gpt_neox", hidden_act="gelu", rms_norm_eps=..., num_key_value_heads=...)
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 97,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
} | dict.fromkeys(raw_config().keys() - {"architectures", "model_type", "vocab_size"}, ...)
COHERE = of("CohereForCausalLM", "cohere", logit_scale=0.3, layer_norm_eps=1e-5)
COHERE2 = COHERE | of("Cohere2ForCausalLM", "cohere2", sliding_window=24, num_hidden_layers=3)
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 24, "num_hidden_layers": 3}
GEMMA2 = of("Gemma2ForCausalLM", "gemma2", **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
GEMMA3 = of("Gemma3ForCausalLM", "gemma3_text", **GEMMA)
OLMO3 = of("Olmo3ForCausalLM", "olmo3", sliding_window=24, num_hidden_layers=3)
BY_TYPE = {
    "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 7000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
LINEAR = {"rope_type": "linear", "factor": 3.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
PARTIAL = {"hidden_size": 32, "partial_rotary_factor": 0.5}
LOCAL_FIRST = ["sliding_attention", "full_attention", "sliding_attention"]
MOE = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
QWEN2_MOE = of("Qwen2MoeForCausalLM", "qwen2_moe", num_experts=5, moe_intermediate_size=16, **MOE)
QWEN3_MOE = of("Qwen3MoeForCausalLM", "qwen3_moe", num_experts=5, moe_intermediate_size=16, head_dim=12, **MOE)
GPT_OSS = of("GptOssForCausalLM", "gpt_oss", num_local_experts=4, head_dim=12, sliding_window=24, **MOE) | {
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": False, "rope_theta": 1000.0}
    | {"original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "falcon 3": {"head_dim": 16, "tie_word_embeddings": False, "rope_theta": 1000042},
    "mistral": of("MistralForCausalLM", "mistral", sliding_window=24),
    "qwen2": of("Qwen2ForCausalLM", "qwen2", use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "qwen3": of("Qwen3ForCausalLM", "qwen3", head_dim=12),
    "granite": GRANITE,
    "smollm3": SMOLLM3 | {"no_rope_layer_interval": 2},
    "smollm3 by list": SMOLLM3 | {"no_rope_layers": [0, 1, 0], "tie_word_embeddings": ...},
    "olmo2": of("Olmo2ForCausalLM", "olmo2"),
    "olmo3": OLMO3 | {"layer_types": LOCAL_FIRST, "rope_parameters": BY_TYPE},
    "olmo3 before version 5": OLMO3 | {"num_hidden_layers": 4, "rope_scaling": YARN, "rope_theta": 5000.0},
    "phi3": PHI3,
    "phi3 long": PHI3 | {"original_max_position_embeddings": 32, "rope_scaling": LONGROPE, **PARTIAL},
    "phi3 short": PHI3 | {"original_max_position_embeddings": 110, "rope_scaling": LONGROPE, **PARTIAL},
    "phi3 window": PHI3 | {"sliding_window": 24},
    "starcoder2": of("Starcoder2ForCausalLM", "starcoder2", hidden_act="gelu_pytorch_tanh", sliding_window=24),
    "starcoder2 plain": of("Starcoder2ForCausalLM", "starcoder2", hidden_act="gelu", use_bias=False),
    "pythia": PYTHIA | {"rotary_pct": 0.5, "rotary_emb_base": 900},
    "neox in order": PYTHIA
    | {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": False, "hidden_size": 32},
    "gpt2": GPT2,
    "gpt2 wide": GPT2 | {"n_inner": 72, "activation_function": "gelu"},
    "command r": COHERE,
    "command r+": COHERE | {"use_qk_norm": True, "attention_bias": True},
    "command r7b": COHERE2 | {"layer_types": LOCAL_FIRST},
    "command r7b by pattern": COHERE2 | {"num_hidden_layers": 4},
    "gemma2": GEMMA2,
    "gemma2 without caps": GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3": GEMMA3 | {"layer_types": LOCAL_FIRST, "rope_parameters": BY_TYPE},
    "mixtral": of("MixtralForCausalLM", "mixtral", num_local_experts=4, sliding_window=24, **MOE),
    "qwen2 moe": QWEN2_MOE | {"shared_expert_intermediate_size": 40, "use_sliding_window": True, "sliding_window": 24},
    "qwen2 moe in part": QWEN2_MOE
    | {"shared_expert_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 2, "qkv_bias": False},
    "qwen3 moe": QWEN3_MOE,
    "qwen3 moe in part": QWEN3_MOE | {"norm_topk_prob": True, "mlp_only_layers": [0]},
    "gpt oss": GPT_OSS,
    "gpt oss in full": GPT_OSS | {"layer_types": ["full_attention"] * 2, "attention_bias": False},
    "gemma3 before version 5": GEMMA3
    | {"rope_local_base_freq": 300.0, "rope_scaling": LINEAR, "rope_theta": 7000.0, "num_hidden_layers": 6},
}


@dataclass(frozen=True)
class Case:
    """A model on disk, and the same by transformers."""

    path: Path
    reference: Any

    def logits(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.reference(torch.tensor([tokens])).logits[0]


def check(case: Case, done: Any, close: float = CLOSE) -> None:
    """Each token is the likeliest after those before it, and its log-probability is that of transformers."""
    tokens = [*done.prompt_token_ids, *done.token_ids]
    logits = case.logits(tokens).numpy()
    for place, score in enumerate([*done.prompt_logprobs[1:], *done.logprobs]):
        oracles.check_logprob(score, tokens[place + 1], logits[place], 2, atol=close)
    for place in range(len(done.prompt_token_ids), len(tokens)):
        assert logits[place - 1, tokens[place]] >= logits[place - 1].max() - close
