"""Mistral: no biases, and a sliding window unless the config has null. In GGUF files it is called llama."""

from gapless.models.config import ModelConfig
from gapless.models.family import Family, hf_attention, hf_layers, hf_mlp, hf_model, hf_norm
from gapless.models.keys import Keys
from gapless.models.spec import LayerSpec

ARCHITECTURE = "MistralForCausalLM"


def from_hf(keys: Keys) -> ModelConfig:
    layer = LayerSpec(hf_attention(keys), hf_mlp(keys), hf_norm(keys))
    return hf_model(keys, ARCHITECTURE, hf_layers(keys, layer, always=True))


FAMILY = Family(ARCHITECTURE, "mistral", from_hf, models="Mistral 7B, Nemo, Small, Ministral", gguf_name="llama")
