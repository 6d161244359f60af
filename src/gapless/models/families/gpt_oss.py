"""GPT-OSS: sinks, a window in every second layer, experts with biases; experts' weights in MXFP4 or plain."""

from dataclasses import replace

from gapless.models.config import ModelConfig
from gapless.models.family import (
    Family,
    GGUFForm,
    all_but,
    hf_attention,
    hf_experts,
    hf_head_dim,
    hf_layers,
    hf_model,
    hf_norm,
)
from gapless.models.keys import Keys
from gapless.models.names import GGUF_NAMES, HF_NAMES
from gapless.models.rope_config import RopeConfig, hf_rope
from gapless.models.spec import LayerSpec

ARCHITECTURE = "GptOssForCausalLM"
NAMES = replace(
    HF_NAMES,
    router="mlp.router",
    expert_gate="",
    expert_up="mlp.experts.gate_up_proj",
    expert_down="mlp.experts.down_proj",
    experts_in_columns=True,
)
GGUF_FORM = GGUFForm(
    "gpt-oss",
    replace(GGUF_NAMES, mlp_norm="post_attention_norm"),
    {"intermediate_size": "expert_feed_forward_length"},
)


def from_hf(keys: Keys) -> ModelConfig:
    bias, size = keys.flag("attention_bias", default=True), keys.size("intermediate_size")
    attention = hf_attention(keys, head_dim=64, rope=_rope(keys), qkv_bias=bias, output_bias=bias, sinks=True)
    mlp = hf_experts(keys, size=size, router_bias=True, activation="clamped", bias=True)
    layer = LayerSpec(attention, mlp, hf_norm(keys, default=1e-5))
    layers = hf_layers(keys, layer, default=128, always=True, is_local=all_but(2))
    return hf_model(keys, ARCHITECTURE, layers, allowed="mxfp4", names=NAMES)


def _rope(keys: Keys) -> RopeConfig:
    """GGUF files do not say that the ends of the ramp between frequencies are no whole numbers."""
    rope = hf_rope(keys, hf_head_dim(keys, 64), theta=150000.0)
    return replace(rope, truncate=False) if keys.is_gguf else rope


FAMILY = Family(ARCHITECTURE, "gpt_oss", from_hf, GGUF_FORM, "GPT-OSS 20B and 120B")
