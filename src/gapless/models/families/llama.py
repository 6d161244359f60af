"""Llama: biases where the config says so. Falcon 3 and many more have its architecture."""

from dataclasses import replace

from gapless.models.config import ModelConfig
from gapless.models.family import Family, GGUFForm, hf_attention, hf_layers, hf_mlp, hf_model, hf_norm
from gapless.models.keys import Keys
from gapless.models.names import GGUF_NAMES
from gapless.models.spec import LayerSpec

ARCHITECTURE = "LlamaForCausalLM"
PAIRS = replace(GGUF_NAMES, pairs=True)  # how GGUF files hold families that are like it


def from_hf(keys: Keys, *, theta: float = 10000.0) -> ModelConfig:
    bias = keys.flag("attention_bias")
    attention = hf_attention(keys, theta=theta, qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(attention, hf_mlp(keys, bias=keys.flag("mlp_bias")), hf_norm(keys))
    return hf_model(keys, ARCHITECTURE, hf_layers(keys, layer))


FAMILY = Family(
    ARCHITECTURE, "llama", from_hf, GGUFForm("llama", PAIRS), "Llama 1 to 3.3, SmolLM2, Falcon 3, Yi, TinyLlama"
)
