"""Qwen3: norms of query and key heads, biases of attention where the config says so, heads of 128 by default."""

from gapless.models.config import ModelConfig
from gapless.models.families.qwen2 import qwen_layers
from gapless.models.family import Family, GGUFForm, hf_attention, hf_mlp, hf_model, hf_norm
from gapless.models.keys import Keys
from gapless.models.spec import LayerSpec

ARCHITECTURE = "Qwen3ForCausalLM"


def from_hf(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias")
    attention = hf_attention(keys, head_dim=128, qkv_bias=bias, output_bias=bias, head_norm="each")
    layer = LayerSpec(attention, hf_mlp(keys), hf_norm(keys))
    return hf_model(keys, ARCHITECTURE, qwen_layers(keys, layer))


FAMILY = Family(ARCHITECTURE, "qwen3", from_hf, GGUFForm("qwen3"), "Qwen3")
