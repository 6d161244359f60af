"""Mixtral: Mistral with experts, whose shares add up to 1. In GGUF files it is called llama."""

from dataclasses import replace

from gapless.models.config import ModelConfig
from gapless.models.families.llama import PAIRS
from gapless.models.family import Family, GGUFForm, hf_attention, hf_experts, hf_layers, hf_model, hf_norm
from gapless.models.keys import Keys
from gapless.models.names import HF_NAMES
from gapless.models.spec import LayerSpec

ARCHITECTURE = "MixtralForCausalLM"
NAMES = replace(
    HF_NAMES,
    router="block_sparse_moe.gate",
    expert_gate="block_sparse_moe.experts.{}.w1",
    expert_up="block_sparse_moe.experts.{}.w3",
    expert_down="block_sparse_moe.experts.{}.w2",
)


def from_hf(keys: Keys) -> ModelConfig:
    mlp = hf_experts(keys, size=keys.size("intermediate_size"))
    layer = LayerSpec(hf_attention(keys, theta=1e6), mlp, hf_norm(keys, default=1e-5))
    return hf_model(keys, ARCHITECTURE, hf_layers(keys, layer, default=None, always=True), names=NAMES)


FAMILY = Family(
    ARCHITECTURE, "mixtral", from_hf, GGUFForm("llama", PAIRS, mark="expert_count"), "Mixtral 8x7B and 8x22B"
)
