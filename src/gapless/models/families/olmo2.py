"""OLMo 2: norms after attention and MLP instead of before, and one norm over all query heads and one over all keys."""

from dataclasses import replace
from typing import Any

from gapless.models.config import ModelConfig
from gapless.models.family import Family, GGUFForm, hf_attention, hf_mlp, hf_model, hf_norm
from gapless.models.keys import Keys
from gapless.models.names import HF_NAMES
from gapless.models.spec import LayerSpec

ARCHITECTURE = "Olmo2ForCausalLM"
NAMES = replace(HF_NAMES, attention_norm_after="post_attention_layernorm", mlp_norm_after="post_feedforward_layernorm")


def olmo_layer(keys: Keys, **more: Any) -> LayerSpec:
    bias = keys.flag("attention_bias")
    attention = hf_attention(keys, qkv_bias=bias, output_bias=bias, head_norm="all", **more)
    return LayerSpec(attention, hf_mlp(keys), hf_norm(keys, default=1e-5, place="after"))


def from_hf(keys: Keys) -> ModelConfig:
    return hf_model(keys, ARCHITECTURE, olmo_layer(keys), names=NAMES)


FAMILY = Family(ARCHITECTURE, "olmo2", from_hf, GGUFForm("olmo2"), "OLMo 2")
