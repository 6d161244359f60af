"""Cohere's Command R: attention and MLP side by side behind one layer norm, scaled logits, rope in pairs."""

from dataclasses import replace
from typing import Any

from gapless.models.config import ModelConfig
from gapless.models.family import Family, GGUFForm, hf_attention, hf_layer_norm, hf_mlp, hf_model
from gapless.models.keys import Keys
from gapless.models.names import GGUF_NAMES, HF_NAMES
from gapless.models.spec import LayerSpec

ARCHITECTURE = "CohereForCausalLM"
NAMES = replace(HF_NAMES, mlp_norm="input_layernorm", pairs=True)
GGUF_FORM = replace(GGUF_NAMES, mlp_norm="attn_norm", pairs=True)


def cohere_layer(keys: Keys) -> LayerSpec:
    bias = keys.flag("attention_bias")
    norm = "layer" if keys.flag("use_qk_norm") else "none"
    attention = hf_attention(keys, theta=500000.0, qkv_bias=bias, output_bias=bias, head_norm=norm)
    return LayerSpec(attention, hf_mlp(keys), hf_layer_norm(keys, bias=False), parallel=True)


def cohere_ends(keys: Keys) -> dict[str, Any]:
    tied = keys.flag("tie_word_embeddings", default=True)
    return {"names": NAMES, "logit_scale": keys.number("logit_scale", 0.0625), "tie_embeddings": tied}


def from_hf(keys: Keys) -> ModelConfig:
    return hf_model(keys, ARCHITECTURE, cohere_layer(keys), **cohere_ends(keys))


FAMILY = Family(ARCHITECTURE, "cohere", from_hf, GGUFForm("command-r", GGUF_FORM), "Command R, Command R+, Aya 23")
