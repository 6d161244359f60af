"""StarCoder2: layer norms, an MLP without a gate, biases everywhere, a window where the config has one."""

from dataclasses import replace

from gapless.models.config import ModelConfig
from gapless.models.family import (
    Family,
    GGUFForm,
    hf_attention,
    hf_layer_norm,
    hf_layers,
    hf_mlp,
    hf_model,
)
from gapless.models.keys import Keys
from gapless.models.names import HF_NAMES
from gapless.models.spec import LayerSpec

ARCHITECTURE = "Starcoder2ForCausalLM"
NAMES = replace(HF_NAMES, gate="", up="mlp.c_fc", down="mlp.c_proj")
GGUF_KEYS = {"norm_epsilon": "attention.layer_norm_epsilon", "use_bias": "attention_bias"}


def from_hf(keys: Keys) -> ModelConfig:
    bias = keys.flag("use_bias", default=True)
    attention = hf_attention(keys, qkv_bias=bias, output_bias=bias)
    mlp = hf_mlp(keys, default="gelu_pytorch_tanh", kind="plain", bias=bias)
    layer = LayerSpec(attention, mlp, hf_layer_norm(keys, "norm_epsilon"))
    return hf_model(
        keys,
        ARCHITECTURE,
        hf_layers(keys, layer, default=None, always=True),
        names=NAMES,
        tie_embeddings=keys.flag("tie_word_embeddings", default=True),
    )


FAMILY = Family(ARCHITECTURE, "starcoder2", from_hf, GGUFForm("starcoder2", keys=GGUF_KEYS), "StarCoder2")
