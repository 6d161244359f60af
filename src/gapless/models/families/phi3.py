"""Phi-3 and Phi-4: q, k and v are one weight, so are gate and up; rope over a part of the head, with longrope."""

from dataclasses import replace

from gapless.models.config import ModelConfig
from gapless.models.family import Family, GGUFForm, hf_attention, hf_head_dim, hf_layers, hf_mlp, hf_model, hf_norm
from gapless.models.keys import Keys
from gapless.models.names import GGUF_NAMES, HF_NAMES
from gapless.models.rope_config import hf_rope
from gapless.models.spec import LayerSpec

ARCHITECTURE = "Phi3ForCausalLM"
QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
NAMES = replace(HF_NAMES, q=QKV, k=QKV, v=QKV, gate=GATE_UP, up=GATE_UP)
GGUF_FORM = replace(GGUF_NAMES, q="attn_qkv", k="attn_qkv", v="attn_qkv", gate="ffn_up")


def from_hf(keys: Keys) -> ModelConfig:
    attention = hf_attention(keys, rope=hf_rope(keys, hf_head_dim(keys), share=1.0))
    layer = LayerSpec(attention, hf_mlp(keys), hf_norm(keys, default=1e-5))
    return hf_model(keys, ARCHITECTURE, hf_layers(keys, layer, default=None, always=True), names=NAMES)


MODELS = "Phi-3 mini and medium, Phi-3.5 mini, Phi-4, Phi-4 mini"
FAMILY = Family(ARCHITECTURE, "phi3", from_hf, GGUFForm("phi3", GGUF_FORM), MODELS)
