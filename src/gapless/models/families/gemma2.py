"""Gemma 2: norms around attention and MLP that add one to their weights, soft caps, windows in every second layer."""

from dataclasses import replace
from typing import Any

from gapless.errors import UnsupportedModel
from gapless.models.config import ModelConfig
from gapless.models.family import Family, GGUFForm, all_but, hf_attention, hf_layers, hf_mlp, hf_model, hf_norm
from gapless.models.keys import Keys
from gapless.models.names import HF_NAMES
from gapless.models.spec import LayerSpec

ARCHITECTURE = "Gemma2ForCausalLM"
NAMES = replace(
    HF_NAMES,
    attention_norm_after="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_norm_after="post_feedforward_layernorm",
)


def gemma_layer(keys: Keys, *, cap: float | None, **more: Any) -> LayerSpec:
    """cap: of scores, where the config has no key for it."""
    if keys.flag("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention is not supported: tokens see earlier ones only")
    bias, scale = keys.flag("attention_bias"), keys.number("query_pre_attn_scalar", _scalar(keys)) ** -0.5
    fields = {"scale": scale, "qkv_bias": bias, "output_bias": bias, "soft_cap": _cap(keys, "attn", cap)}
    attention = hf_attention(keys, head_dim=256, **fields | more)
    mlp = hf_mlp(keys, key="hidden_activation", default="gelu_pytorch_tanh")
    return LayerSpec(attention, mlp, hf_norm(keys, place="around", offset=1.0))


def _scalar(keys: Keys) -> int:
    """GGUF files do not say it: it is the size of a head, but for the 27B models, whose heads are smaller than that."""
    if not keys.is_gguf:
        return 256
    is_27b = keys.size("num_hidden_layers") in (46, 62)
    return keys.size("hidden_size") // keys.size("num_attention_heads") if is_27b else keys.size("head_dim", 256)


def gemma_ends(keys: Keys, *, cap: float | None) -> dict[str, Any]:
    """cap: of logits, where the config has no key for it."""
    return {
        "names": NAMES,
        "embedding_scale": keys.size("hidden_size") ** 0.5,
        "logit_soft_cap": _cap(keys, "final", cap),
        "tie_embeddings": keys.flag("tie_word_embeddings", default=True),
    }


def _cap(keys: Keys, which: str, default: float | None) -> float | None:
    key = f"{which}_logit_softcapping"
    is_there = keys.get(key) is not None or (default is not None and not keys.is_null(key))
    return keys.number(key, default) if is_there else None


def from_hf(keys: Keys) -> ModelConfig:
    layers = hf_layers(keys, gemma_layer(keys, cap=50.0), always=True, is_local=all_but(2))
    return hf_model(keys, ARCHITECTURE, layers, **gemma_ends(keys, cap=30.0))


FAMILY = Family(ARCHITECTURE, "gemma2", from_hf, GGUFForm("gemma2"), "Gemma 2")
