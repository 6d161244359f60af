"""Granite: Llama with four scales.

What a layer adds to the stream is multiplied by residual_multiplier. Here the stream is divided by it instead: norms
undo that if their epsilon shrinks by its square, and embeddings get it as a part of their scale.
"""

from dataclasses import replace

from gapless.models.config import ModelConfig
from gapless.models.families.llama import PAIRS
from gapless.models.family import Family, GGUFForm, hf_attention, hf_mlp, hf_model, hf_norm
from gapless.models.keys import Keys
from gapless.models.spec import LayerSpec

ARCHITECTURE = "GraniteForCausalLM"
GGUF_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}


def from_hf(keys: Keys) -> ModelConfig:
    bias, share = keys.flag("attention_bias"), keys.number("residual_multiplier", 1.0)
    scale = keys.number("attention_multiplier", 1.0)
    attention = hf_attention(keys, qkv_bias=bias, output_bias=bias, scale=scale)
    norm = hf_norm(keys)
    layer = LayerSpec(attention, hf_mlp(keys, bias=keys.flag("mlp_bias")), replace(norm, eps=norm.eps / share**2))
    return hf_model(
        keys,
        ARCHITECTURE,
        layer,
        embedding_scale=keys.number("embedding_multiplier", 1.0) / share,
        logit_scale=1 / keys.number("logits_scaling", 1.0),
    )


FAMILY = Family(ARCHITECTURE, "granite", from_hf, GGUFForm("granite", PAIRS, GGUF_KEYS), "Granite 3.0 to 3.3")
