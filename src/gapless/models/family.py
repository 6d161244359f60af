"""The definition of a family, and the keys of config.json and of GGUF metadata that mean the same in all families.

Refuses what would be computed wrongly without an error. Knows no weights and no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gapless.errors import CorruptModel, UnsupportedModel
from gapless.models.config import ModelConfig, repeated
from gapless.models.files import INT32_MAX, shown
from gapless.models.gguf_file import GGUFFile
from gapless.models.keys import Keys
from gapless.models.rope_config import gguf_rope, hf_rope
from gapless.models.spec import AttentionSpec, LayerSpec, MlpSpec, NormSpec


@dataclass(frozen=True, slots=True)
class GGUFForm:
    """How GGUF files hold a family."""

    architecture: str  # general.architecture
    has_pairs: bool = False  # rows of q and k that are rotated together lie side by side, not half a head apart


@dataclass(frozen=True, slots=True)
class Family:
    """Models that one function can describe."""

    architecture: str  # in `architectures` of a config.json
    model_type: str  # in its `model_type`
    from_hf: Callable[[Keys], ModelConfig]  # end tokens aside
    gguf: GGUFForm | None = None  # None: there are no GGUF files of this family


def hf_model(keys: Keys, architecture: str, layer: LayerSpec, **more: Any) -> ModelConfig:
    """A model whose layers are alike; `more` are fields of the config that differ from their defaults."""
    refuse_quantized(keys)
    return ModelConfig(
        architecture=architecture,
        vocab_size=keys.size("vocab_size"),
        hidden_size=keys.size("hidden_size"),
        layers=repeated(layer, keys.size("num_hidden_layers")),
        last_norm=hf_norm(keys),
        max_position_embeddings=keys.size("max_position_embeddings"),
        tie_embeddings=keys.flag("tie_word_embeddings"),
        **more,
    )


def hf_attention(keys: Keys, *, head_dim: int | None = None, **more: Any) -> AttentionSpec:
    """Attention to the whole context; head_dim: where the config has none, instead of hidden_size / num_heads."""
    num_heads = keys.size("num_attention_heads")
    head_dim = keys.size("head_dim", head_dim or keys.size("hidden_size") // num_heads)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=keys.size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=hf_rope(keys),
        **more,
    )


def hf_mlp(keys: Keys, *, bias: bool = False) -> MlpSpec:
    """The gated one."""
    activation = keys.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {shown(activation)} is not supported; Gapless has silu only")
    return MlpSpec(keys.size("intermediate_size"), bias=bias)


def hf_norm(keys: Keys) -> NormSpec:
    return NormSpec(keys.number("rms_norm_eps", 1e-6))


def refuse_quantized(keys: Keys) -> None:
    quantization = keys.mapping("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raise UnsupportedModel(
            f"quantization_config ({shown(method)}) is not supported; use the unquantized model or a GGUF"
        )


def refuse_windows(keys: Keys, *, always: bool = False) -> None:
    """Refuse a sliding window shorter than the context; always: it counts even without use_sliding_window."""
    in_use = (always or keys.flag("use_sliding_window")) and keys.raw.get("sliding_window", 4096) is not None
    if in_use and (window := keys.size("sliding_window", 4096)) < keys.size("max_position_embeddings"):
        raise UnsupportedModel(f"sliding_window {window} is not supported; Gapless attends to the whole context")
    kinds = set(keys.strings("layer_types"))
    if kinds - {"full_attention"}:
        raise UnsupportedModel(f"layer_types {shown(sorted(kinds))}: only full_attention is supported")


def gguf_model(file: GGUFFile, keys: Keys, architecture: str) -> ModelConfig:
    """Biases, norms of heads and tied embeddings show by which tensors there are."""
    hidden_size, tensors = keys.size("embedding_length"), file.tensors
    attention = _gguf_attention(file, keys, hidden_size)
    mlp = MlpSpec(keys.size("feed_forward_length"), bias="blk.0.ffn_gate.bias" in tensors)
    norm = NormSpec(keys.number("attention.layer_norm_rms_epsilon"))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_gguf_vocab_size(file),
        hidden_size=hidden_size,
        layers=repeated(LayerSpec(attention, mlp, norm), keys.size("block_count")),
        last_norm=norm,
        max_position_embeddings=keys.size("context_length"),
        tie_embeddings="output.weight" not in tensors,
    )


def _gguf_attention(file: GGUFFile, keys: Keys, hidden_size: int) -> AttentionSpec:
    num_heads, tensors = keys.size("attention.head_count"), file.tensors
    head_dim = keys.size("attention.key_length", hidden_size // num_heads)
    _refuse_gguf_features(keys, head_dim)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=keys.size("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=gguf_rope(file, keys),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        head_norm="blk.0.attn_q_norm.weight" in tensors,
    )


def _refuse_gguf_features(keys: Keys, head_dim: int) -> None:
    if keys.size("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(f"{keys.where}: rope over a part of the head is not supported")
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{keys.where}: values whose size differs from that of keys are not supported")
    if keys.get("expert_count"):
        raise UnsupportedModel(f"{keys.where}: mixture of experts is not supported")
    context_length = keys.size("context_length")
    if keys.get("attention.sliding_window") and keys.size("attention.sliding_window") < context_length:
        raise UnsupportedModel(f"{keys.where}: sliding_window is not supported; Gapless attends to the whole context")


def _gguf_vocab_size(file: GGUFFile) -> int:
    name = "token_embd.weight"
    if name not in file.tensors:
        raise CorruptModel(f"{file.path}: the tensor {name} is missing")
    shape = file.tensors[name].shape
    if len(shape) != 2 or not 0 < shape[0] <= INT32_MAX:
        raise CorruptModel(f"{file.path}: tensor {name} has shape {shape}, which is not a table of tokens")
    return shape[0]
