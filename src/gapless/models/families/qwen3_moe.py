"""Qwen3-MoE: Qwen3 with experts in all layers, or in those that the config does not leave out."""

from dataclasses import replace

from gapless.models.config import ModelConfig
from gapless.models.families import qwen3
from gapless.models.family import Family, GGUFForm, hf_experts
from gapless.models.keys import Keys

ARCHITECTURE = "Qwen3MoeForCausalLM"


def from_hf(keys: Keys) -> ModelConfig:
    size, step = keys.size("moe_intermediate_size"), keys.size("decoder_sparse_step", 1)
    left_out = keys.get("mlp_only_layers", [])
    normalized = keys.flag("norm_topk_prob", default=keys.is_gguf)
    experts = hf_experts(keys, size=size, is_normalized=normalized)
    config = qwen3.from_hf(keys)
    layers = [
        layer if index in left_out or (index + 1) % step else replace(layer, mlp=experts)
        for index, layer in enumerate(config.layers)
    ]
    return replace(config, architecture=ARCHITECTURE, layers=tuple(layers))


FAMILY = Family(
    ARCHITECTURE, "qwen3_moe", from_hf, GGUFForm("qwen3moe", has_experts=True), "Qwen3-30B-A3B, Qwen3-235B-A22B"
)
