"""Qwen2: biases on q, k and v, whatever the config says."""

from gapless.models.config import ModelConfig
from gapless.models.family import Family, GGUFForm, hf_attention, hf_mlp, hf_model, hf_norm, refuse_windows
from gapless.models.keys import Keys
from gapless.models.spec import LayerSpec

ARCHITECTURE = "Qwen2ForCausalLM"


def from_hf(keys: Keys) -> ModelConfig:
    refuse_windows(keys)
    return hf_model(keys, ARCHITECTURE, LayerSpec(hf_attention(keys, qkv_bias=True), hf_mlp(keys), hf_norm(keys)))


FAMILY = Family(ARCHITECTURE, "qwen2", from_hf, GGUFForm("qwen2"))
