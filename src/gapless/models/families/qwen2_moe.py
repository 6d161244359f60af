"""Qwen2-MoE: Qwen2 with experts, one of them shared, in all layers, or in those that the config does not leave out."""

from dataclasses import replace

from gapless.models.config import ModelConfig
from gapless.models.family import Family, GGUFForm, hf_attention, hf_experts, hf_layers, hf_mlp, hf_model, hf_norm
from gapless.models.keys import Keys
from gapless.models.spec import LayerSpec, MlpSpec

ARCHITECTURE = "Qwen2MoeForCausalLM"


def with_experts(keys: Keys, config: ModelConfig, experts: MlpSpec) -> ModelConfig:
    """The model with experts in the layers that have some."""
    step, left_out = keys.size("decoder_sparse_step", 1), keys.get("mlp_only_layers", [])
    if not isinstance(left_out, list) or not all(type(index) is int for index in left_out):
        raise keys.wrong("mlp_only_layers", "a list of layers")
    layers = [
        layer if index in left_out or (index + 1) % step else replace(layer, mlp=experts)
        for index, layer in enumerate(config.layers)
    ]
    return replace(config, layers=tuple(layers))


def from_hf(keys: Keys) -> ModelConfig:
    attention = hf_attention(keys, qkv_bias=keys.flag("qkv_bias", default=True))
    layer, first = LayerSpec(attention, hf_mlp(keys), hf_norm(keys)), keys.count("max_window_layers", 28)
    layers = hf_layers(keys, layer, is_local=lambda index: index % 2 == 0 and index < first)
    experts = hf_experts(
        keys,
        size=keys.size("moe_intermediate_size", 1408),
        is_normalized=keys.flag("norm_topk_prob"),
        shared_size=keys.size("shared_expert_intermediate_size", 5632),
    )
    return with_experts(keys, hf_model(keys, ARCHITECTURE, layers), experts)


FAMILY = Family(ARCHITECTURE, "qwen2_moe", from_hf, GGUFForm("qwen2moe"), "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B")
