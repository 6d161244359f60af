"""Qwen3-MoE: Qwen3 with experts in all layers, or in those that the config does not leave out."""

from dataclasses import replace

from gapless.models.config import ModelConfig
from gapless.models.families import qwen3
from gapless.models.families.qwen2_moe import with_experts
from gapless.models.family import Family, GGUFForm, hf_experts
from gapless.models.keys import Keys

ARCHITECTURE = "Qwen3MoeForCausalLM"


def from_hf(keys: Keys) -> ModelConfig:
    normalized = keys.flag("norm_topk_prob", default=keys.is_gguf)
    experts = hf_experts(keys, size=keys.size("moe_intermediate_size"), is_normalized=normalized)
    return with_experts(keys, replace(qwen3.from_hf(keys), architecture=ARCHITECTURE), experts)


FAMILY = Family(ARCHITECTURE, "qwen3_moe", from_hf, GGUFForm("qwen3moe"), "Qwen3-30B-A3B, Qwen3-235B-A22B")
