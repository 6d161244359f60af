"""Qwen2: biases on q, k and v, whatever the config says; windows, where they are in use, from max_window_layers on."""

from gapless.models.config import ModelConfig
from gapless.models.family import Family, GGUFForm, hf_attention, hf_layers, hf_mlp, hf_model, hf_norm
from gapless.models.keys import Keys
from gapless.models.spec import LayerSpec

ARCHITECTURE = "Qwen2ForCausalLM"


def qwen_layers(keys: Keys, layer: LayerSpec) -> list[LayerSpec]:
    first = keys.count("max_window_layers", 28)
    return hf_layers(keys, layer, is_local=lambda index: index >= first)


def from_hf(keys: Keys) -> ModelConfig:
    layer = LayerSpec(hf_attention(keys, qkv_bias=True), hf_mlp(keys), hf_norm(keys))
    return hf_model(keys, ARCHITECTURE, qwen_layers(keys, layer))


FAMILY = Family(ARCHITECTURE, "qwen2", from_hf, GGUFForm("qwen2"), "Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen")
