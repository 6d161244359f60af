"""Qwen3: norms of query and key heads, biases of attention where the config says so, heads of 128 by default."""

from gapless.models.config import ModelConfig
from gapless.models.family import Family, GGUFForm, hf_attention, hf_mlp, hf_model, hf_norm, refuse_windows
from gapless.models.keys import Keys
from gapless.models.spec import LayerSpec

ARCHITECTURE = "Qwen3ForCausalLM"


def from_hf(keys: Keys) -> ModelConfig:
    refuse_windows(keys)
    bias = keys.flag("attention_bias")
    attention = hf_attention(keys, head_dim=128, qkv_bias=bias, output_bias=bias, head_norm=True)
    return hf_model(keys, ARCHITECTURE, LayerSpec(attention, hf_mlp(keys), hf_norm(keys)))


FAMILY = Family(ARCHITECTURE, "qwen3", from_hf, GGUFForm("qwen3"))
