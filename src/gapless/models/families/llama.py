"""Llama: biases where the config says so."""

from gapless.models.config import ModelConfig
from gapless.models.family import Family, GGUFForm, hf_attention, hf_mlp, hf_model, hf_norm, refuse_windows
from gapless.models.keys import Keys
from gapless.models.spec import LayerSpec

ARCHITECTURE = "LlamaForCausalLM"


def from_hf(keys: Keys) -> ModelConfig:
    refuse_windows(keys)
    bias = keys.flag("attention_bias")
    attention = hf_attention(keys, qkv_bias=bias, output_bias=bias)
    mlp = hf_mlp(keys, bias=keys.flag("mlp_bias"))
    return hf_model(keys, ARCHITECTURE, LayerSpec(attention, mlp, hf_norm(keys)))


FAMILY = Family(ARCHITECTURE, "llama", from_hf, GGUFForm("llama", has_pairs=True))
