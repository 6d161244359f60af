"""A family that is not in the registry, to show that there is room for it: Gemma 2.

Norms stand around attention and MLP and add one to their weights, scores and logits have soft caps, every second layer
has a window, the activation is GELU, and embeddings are scaled. Only the torch path runs it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gapless.models.config import ModelConfig, check_num_layers
from gapless.models.family import Family, hf_attention, hf_model, hf_norm
from gapless.models.keys import Keys
from gapless.models.names import WeightNames
from gapless.models.spec import LayerSpec, MlpSpec

ARCHITECTURE = "Gemma2ForCausalLM"
NAMES = WeightNames(
    attention_norm_after="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_norm_after="post_feedforward_layernorm",
)
RAW: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "model_type": "gemma2",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 3,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}


def from_hf(keys: Keys) -> ModelConfig:
    scale, cap = keys.number("query_pre_attn_scalar") ** -0.5, keys.number("attn_logit_softcapping")
    attention = replace(hf_attention(keys), scale=scale, soft_cap=cap)
    windowed = replace(attention, window=keys.size("sliding_window"))
    mlp = MlpSpec(keys.size("intermediate_size"), activation="gelu_tanh")
    norm = replace(hf_norm(keys), offset=1.0)
    full, near = (LayerSpec(spec, mlp, replace(norm, place="around")) for spec in (attention, windowed))
    num_layers = keys.size("num_hidden_layers")
    check_num_layers(num_layers)
    config = hf_model(
        keys,
        ARCHITECTURE,
        full,
        names=NAMES,
        embedding_scale=keys.size("hidden_size") ** 0.5,
        logit_soft_cap=keys.number("final_logit_softcapping"),
    )
    return replace(config, layers=tuple(full if i % 2 else near for i in range(num_layers)), last_norm=norm)


FAMILY = Family(ARCHITECTURE, "gemma2", from_hf)
